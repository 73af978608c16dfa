"""A pserver that dies at any storage call of its log or checkpoint continues with what it acked.

If its machine loses power there, it continues with what was durable, and a prefix of the rest.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections import Counter
from contextlib import suppress
from functools import cache, partial
from itertools import count, islice
from pathlib import Path

import numpy as np
import pytest

from fleet_sparse.core.criteria import UNSEEN_DAYS, Criterion
from fleet_sparse.pserver.admin.log_recovery import close_log, write_checkpoint
from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.pserver.tables.embedding import EmbeddingTable
from fleet_sparse.pserver.tables.mutations import DayEnd
from support.failpoints import AFTER, BEFORE, STORAGE_CALLS, TORN, Failpoint
from support.logs import close, linked_save, load_into, logged_shard, recovered, state_of
from support.power_loss import PowerLoss
from support.shards import ADAM, CLIENT, SGD, FrameClient, make_shard, push

# The log's own thread ends with the process.
pytestmark = pytest.mark.filterwarnings("ignore:Exception in thread fleet_sparse log")
NUM_CRASHES = 20  # at each call
IDS = np.arange(4)
GRADS = np.tile(np.float32([1.0, 0.0]), (len(IDS), 1))
POINTS = [(call, when) for call in STORAGE_CALLS for when in (BEFORE, AFTER)] + [("pwritev", TORN)]


class Life:
    """A pserver that is started, trained, loaded, shrunk, checkpointed, saved and ended twice, by a seed.

    Attributes:
        num_acked: Pushes that were acked. Push k subtracts 1 from each row of a table, in SGD.
        num_durable: Those of them that replies may have called durable.
        num_loads: By how many loads rows are lower than pushes made them: those that have ended, and those that began.
        num_days: Number of days that have ended, and of ends that began; a load begins with day 0.
    """

    def __init__(self, directory: Path, seed: int) -> None:
        self.num_acked = self.num_durable = 0
        self.num_loads = self.num_days = (0, 0)
        self._directory = directory
        self._random = random.Random(seed)
        self._shards: list[Shard] = []

    def run(self) -> None:
        for _ in range(2):
            shard = begun(self._directory)
            self._shards.append(shard)
            client = FrameClient(shard)
            client.seq = self.num_durable = self.num_acked
            for _ in range(self._random.randint(2, 5)):
                self._train(client)
                self._change(client)
                self._begin_log(shard)
            self._train(client)
            close(shard)
            self._shards.remove(shard)

    def _change(self, client: FrameClient[Shard]) -> None:
        """Loads rows that are lower by 1, or ends a day and removes no row, or changes nothing; durably."""
        shard, kind = client.shard, self._random.choice(["load", "shrink", ""])
        assert shard.log is not None
        done, ended = self.num_loads[0], self.num_days[0]
        if kind == "load":
            self.num_loads, self.num_days = (done, done + 1), (0, ended)
            load_into(shard, loaded_shard(client.seq, done + 1))
            shard.log.writer.sync()
            self.num_loads, self.num_days = (done + 1, done + 1), (0, 0)
        elif kind == "shrink":
            self.num_days = ended, ended + 1
            shard.commit([], [DayEnd(SGD.table_id)])
            assert shard.shrink([Criterion(UNSEEN_DAYS, 1000)])[SGD.name].num_rows == len(IDS)
            shard.log.writer.sync()
            self.num_days = ended + 1, ended + 1

    def _begin_log(self, shard: Shard) -> None:
        """Makes the log begin with a checkpoint, which is linked from a save more often than not."""
        kind = self._random.choice(["full", "delta", "delta", ""])
        if kind:
            linked_save(shard, self._directory.with_name("model"), kind)
        else:
            write_checkpoint(shard)

    def _train(self, client: FrameClient[Shard]) -> None:
        for _ in range(self._random.randint(1, 6)):
            push_once(client)
            self.num_acked = client.seq
            if self._random.random() < 0.2:
                assert client.shard.log is not None
                client.shard.log.writer.sync()
            self.num_durable = client.shard.durable_push(CLIENT)

    def free(self) -> None:
        """Frees what a crash has left behind in this process. Its files are not looked at any more."""
        for shard in self._shards:
            with suppress(OSError):
                close(shard)


def loaded_shard(num_pushes: int, num_loads: int) -> Shard:
    """Returns a shard that has got the first pushes of a life, and whose rows of SGD are lower by a number of loads."""
    shard = make_shard(SGD, ADAM)
    client = FrameClient(shard)
    for _ in range(num_pushes):
        push_once(client)
    for _ in range(num_loads):
        assert client.push(push(SGD, IDS, GRADS)).error is None
    return shard


def begun(directory: Path) -> Shard:
    shard = logged_shard(directory, segment_bytes=1024)
    for spec in (SGD, ADAM):
        if spec.table_id not in shard.tables:
            shard.add_table(spec, declared_by="worker 0")
    return shard


def push_once(client: FrameClient[Shard]) -> None:
    block = push(ADAM, IDS, np.ones((len(IDS), 3), np.float32), optimizer_step=client.seq + 1)
    assert client.push(push(SGD, IDS, GRADS), block).error is None


def check_continues(directory: Path, life: Life, num_kept: int) -> None:
    """Checks that a prefix of the pushes is applied, up to the one after those that were acked; then trains on."""
    shard = begun(directory)
    client = FrameClient(shard)
    client.seq = shard.ledger.applied(CLIENT)
    assert num_kept <= client.seq <= life.num_acked + 1
    table = shard.tables[SGD.table_id].table
    assert isinstance(table, EmbeddingTable)
    assert life.num_days[0] <= table.store.num_days <= life.num_days[1]
    num_loads = round(0.5 - client.seq - client.rows(SGD, 0)[0][0])
    assert num_loads in life.num_loads
    for _ in range(2):
        assert client.rows(SGD, *IDS.tolist()) == [[0.5 - client.seq - num_loads, 0.5]] * len(IDS)
        assert shard.tables[ADAM.table_id].table.optimizer_step == client.seq
        push_once(client)
    write_checkpoint(shard)
    push_once(client)
    again = recovered(shard)
    assert state_of(again) == state_of(shard)
    for each in (shard, again):
        close(each)


@cache
def counted_calls(seed: int) -> Counter[str]:
    """Returns the storage calls of a life, by name."""
    failpoint = Failpoint()
    with tempfile.TemporaryDirectory() as directory:
        failpoint.run(Life(Path(directory) / "log", seed).run)
    return failpoint.counts


def crash(directory: Path, call: str, when: str, seed: int, *, loses_power: bool = False) -> None:
    """Lets a life end at a call of a storage function, and checks the next one."""
    number = random.Random(seed).randrange(counted_calls(seed)[call])
    # The log's own thread makes some calls more or less often.
    while not is_reached(directory / str(number), Failpoint(call, number, when), seed, loses_power=loses_power):
        assert number > 0, f"a life without {call}"
        number //= 2


def is_reached(directory: Path, failpoint: Failpoint, seed: int, *, loses_power: bool) -> bool:
    """Runs a life up to a failpoint or its end, and checks the next one; returns whether it was the failpoint."""
    life = Life(directory / "log", seed)
    left = directory.with_name(f"{directory.name}-left")
    directory.mkdir(parents=True)
    disk = PowerLoss(directory)
    try:
        if loses_power:
            with disk.watched():
                failpoint.run(life.run, lambda: disk.lose(left, random.Random(seed)))
            check_continues(left / "log", life, life.num_durable)
        else:
            failpoint.run(life.run, lambda: shutil.copytree(directory, left))
            check_continues(left / "log", life, life.num_acked)
    finally:
        life.free()
        disk.close()
    return failpoint.has_crashed


@pytest.mark.guarantee("W1")
@pytest.mark.guarantee("W2")
@pytest.mark.parametrize(("call", "when"), POINTS)
@pytest.mark.parametrize("loses_power", [False, True], ids=["killed", "without power"])
@pytest.mark.parametrize("num_crashes", [3, pytest.param(NUM_CRASHES, marks=pytest.mark.slow)])
def test_crash_at_a_storage_call_loses_and_doubles_nothing(
    tmp_path: Path, call: str, when: str, num_crashes: int, *, loses_power: bool
) -> None:
    for seed in islice((seed for seed in count() if counted_calls(seed)[call]), num_crashes):
        crash(tmp_path / str(seed), call, when, seed, loses_power=loses_power)


@pytest.mark.parametrize("call", ["rename", "unlink", "rmdir"])
@pytest.mark.parametrize("when", [BEFORE, AFTER])
@pytest.mark.parametrize("seed", [None, *range(4)])
def test_crash_at_the_end_of_a_job_leaves_a_whole_log_or_none(
    tmp_path: Path, call: str, when: str, seed: int | None
) -> None:
    number = 0
    while ends_at(tmp_path / str(number), Failpoint(call, number, when), seed):
        number += 1
    assert number > 0


def ends_at(root: Path, failpoint: Failpoint, seed: int | None) -> bool:
    """Ends a job up to a failpoint, and checks what is left of its log; returns whether it was reached.

    With a `seed` the machine loses power there.
    """
    directory, left = root / "job" / "log", root / "left"
    (root / "job").mkdir(parents=True)
    shard = begun(directory)
    client = FrameClient(shard)
    push_once(client)
    write_checkpoint(shard)
    push_once(client)
    log = shard.log
    assert log is not None
    log.is_finished = True
    log.writer.sync()
    disk = PowerLoss(root / "job")
    with disk.watched():
        look = partial(
            *(shutil.copytree, root / "job", left) if seed is None else (disk.lose, left, random.Random(seed))
        )
        failpoint.run(lambda: close_log(log), look)
    shard.close()
    disk.close()
    again = begun(left / "log")
    assert again.ledger.applied(CLIENT) in (0, 2)
    assert sorted(path.name for path in left.iterdir()) == ["log"]
    close(again)
    return failpoint.has_crashed
