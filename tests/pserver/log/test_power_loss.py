"""A log on a disk that loses power has all that was durable, and a prefix of the rest."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from fleet_sparse.errors import FleetSparseError
from fleet_sparse.pserver.admin.log_recovery import write_checkpoint
from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.pserver.log.log_format import Kind, padded
from fleet_sparse.pserver.log.log_reader import LogReader
from fleet_sparse.pserver.log.log_writer import LogWriter
from support.failpoints import AFTER, BEFORE, Failpoint
from support.logs import close, linked_save, logged_shard, small_writer
from support.power_loss import PowerLoss
from support.saves import rows_in
from support.shards import CLIENT, SGD, FrameClient, push

# The log's own thread ends with the process.
pytestmark = pytest.mark.filterwarnings("ignore:Exception in thread fleet_sparse log")
NUM_LIVES = 6
KILLED_SHARE = 0.4
CALLS = "rename", "fsync", "fdatasync", "pwrite", "posix_fallocate", "ftruncate", "unlink", "pwritev"
MAX_ROWS = 400  # of a push: two pages
SEGMENT_BYTES = 16 << 10


class Machine:
    """A pserver that is killed, or whose machine loses power, again and again, and a list of what it was sent.

    Push k of the list adds rows that no other push has. So rows of a push that was lost, and of a former life, show.

    Attributes:
        pushes: Ids of the rows of each push that was sent.
        num_acked: Pushes that were acked.
        num_durable: Pushes that replies may have called durable.
        num_kept: Pushes that the next process has at least.
    """

    def __init__(self, directory: Path, seed: int) -> None:
        self.pushes: list[list[int]] = []
        self.num_acked = self.num_durable = self.num_kept = 0
        self._directory = directory
        self._random = random.Random(seed)
        self._next_id = 0
        self._shards: list[Shard] = []
        self._disks: list[PowerLoss] = []

    def run(self) -> None:
        root = self._directory / "0"
        root.mkdir()
        disk = self._new_disk(root)
        for number in range(1, NUM_LIVES + 1):
            failpoint = self._failpoint()
            with disk.watched():
                failpoint.run(partial(self._live, root), disk.kill)
            if self._random.random() < KILLED_SHARE:
                self.num_kept = self.num_acked
            else:
                self.num_kept = self.num_acked = self.num_durable
                root = self._directory / str(number)
                disk.lose(root, self._random)
                disk = self._new_disk(root)
        with disk.watched():
            self._begin(root)

    def _failpoint(self) -> Failpoint:
        """Returns where the next process ends, often in its start."""
        if self._random.random() < KILLED_SHARE:
            return Failpoint()
        return Failpoint(self._random.choice(CALLS), self._random.randint(0, 5), self._random.choice([BEFORE, AFTER]))

    def _live(self, root: Path) -> None:
        client = self._begin(root)
        for _ in range(self._random.randint(0, 25)):
            self._act(client, root)

    def free(self) -> None:
        for shard in self._shards:
            with suppress(OSError, FleetSparseError):
                close(shard)
        for disk in self._disks:
            disk.close()

    def _new_disk(self, root: Path) -> PowerLoss:
        self._disks.append(PowerLoss(root))
        return self._disks[-1]

    def _begin(self, root: Path) -> FrameClient[Shard]:
        """Starts the pserver, and checks what it has."""
        shard = logged_shard(root / "log", segment_bytes=SEGMENT_BYTES)
        self._shards.append(shard)
        if SGD.table_id not in shard.tables:
            shard.add_table(SGD, declared_by="worker 0")
        client = FrameClient(shard)
        client.seq = shard.ledger.applied(CLIENT)
        assert self.num_kept <= client.seq <= len(self.pushes)
        del self.pushes[client.seq :]
        self.num_acked = client.seq
        assert sorted(rows_in([shard], SGD)) == sorted(chain.from_iterable(self.pushes))
        self._note_durable(shard)
        return client

    def _act(self, client: FrameClient[Shard], root: Path) -> None:
        shard, what = client.shard, self._random.random()
        assert shard.log is not None
        if what < 0.75:
            ids = [*range(self._next_id, self._next_id + self._random.randint(1, MAX_ROWS))]
            self._next_id += len(ids)
            self.pushes.append(ids)
            assert client.push(push(SGD, np.array(ids), np.ones((len(ids), 2), np.float32))).error is None
            self.num_acked += 1
        elif what < 0.9:
            shard.log.writer.sync()
        elif what < 0.95:
            write_checkpoint(shard)
        else:
            linked_save(shard, root / "model", self._random.choice(["full", "delta"]))
        self._note_durable(shard)

    def _note_durable(self, shard: Shard) -> None:
        self.num_durable = shard.durable_push(CLIENT)


@pytest.fixture
def machines() -> Iterator[list[Machine]]:
    made: list[Machine] = []
    yield made
    for each in made:
        each.free()


@pytest.mark.guarantee("W4")
@pytest.mark.guarantee("F4")
@pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(20, 600), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_a_loss_of_power_leaves_all_that_was_durable(tmp_path: Path, machines: list[Machine], seeds: range) -> None:
    for seed in seeds:
        directory = tmp_path / str(seed)
        directory.mkdir()
        machines.append(Machine(directory, seed))
        machines[-1].run()
        machines[-1].free()


def append(writer: LogWriter, *texts: bytes) -> None:
    for text in texts:
        writer.append(Kind.TABLE, body_bytes=len(text), parts=padded(text))


def bodies_of(reader: LogReader) -> list[bytes]:
    return [record.body for record in reader.records()]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The durable directory of a log."""
    (tmp_path / "disk" / "log").mkdir(parents=True)
    return tmp_path / "disk" / "log"


def all_left(disk: PowerLoss, directory: Path) -> list[list[bytes]]:
    """Returns what losses of power now may leave of the log in a directory."""
    found = []
    for seed in range(200):
        lost = directory.parent.with_name(f"lost-{seed}")
        disk.lose(lost, random.Random(seed))
        bodies = bodies_of(LogReader(lost / "log"))
        if bodies not in found:
            found.append(bodies)
    return found


@pytest.mark.guarantee("F4")
def test_a_log_whose_first_start_ended_early_has_a_durable_name(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    disk, directory = PowerLoss(tmp_path / "disk"), tmp_path / "disk" / "log"
    with disk.watched():
        Failpoint("mkdir", 0, AFTER).run(partial(logged_shard, directory), disk.kill)
        shard = logged_shard(directory, SGD)
        assert FrameClient(shard).push(push(SGD, np.arange(3), np.ones((3, 2), np.float32))).error is None
        assert shard.log is not None
        shard.log.writer.sync()
        found = all_left(disk, directory)
    assert [len(bodies) for bodies in found] == [2]
    close(shard)
    disk.close()


@pytest.mark.guarantee("W4")
@pytest.mark.parametrize("number", [0, 1])
def test_the_segment_of_a_start_follows_durable_names(directory: Path, number: int) -> None:
    disk = PowerLoss(directory.parent)
    with disk.watched():
        former = small_writer(directory)
        append(former, b"one")
        former.begin_segment()
        append(former, b"two")
        disk.kill()
        reader = LogReader(directory)
        assert bodies_of(reader) == [b"one", b"two"]
        reader.cut_off()
        changes = {"newest_lsn": 2, "newest_checksum": reader.newest_checksum}
        start = partial(small_writer, directory, generation=2, **changes)
        Failpoint("rename", number, AFTER).run(start, disk.kill)
        assert sorted(all_left(disk, directory)) in ([[b"one"], [b"one", b"two"]], [[b"one", b"two"]])
    disk.close()
