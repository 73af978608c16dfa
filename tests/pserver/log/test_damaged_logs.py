"""A log of all kinds of changes that is cut or changed gives a prefix of the changes, or it is refused."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fleet_sparse.core.criteria import MIN_NORM, Criterion
from fleet_sparse.core.mode import SYNC, Mode
from fleet_sparse.errors import LogCorrupt
from fleet_sparse.pserver.admin.log_recovery import recover, write_checkpoint
from fleet_sparse.pserver.engine.progress import NO_PROGRESS
from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.pserver.log.control_state import (
    BarrierOpening,
    ControlChange,
    CutSave,
    RegisteredWorker,
    ReportedProgress,
)
from fleet_sparse.pserver.log.lineage import LineageChange
from fleet_sparse.pserver.log.log_format import Kind
from fleet_sparse.pserver.log.log_reader import LogReader
from fleet_sparse.pserver.tables.mutations import DayEnd, Push
from fleet_sparse.pserver.tables.row_limit import UNLIMITED
from fleet_sparse.wire.frame_format import Action, Block, Op
from support.logs import close, load_into, logged_shard, state_of
from support.shards import ADAM, CLIENT, DENSE, SGD, FrameClient, assign, floats, ids_of, make_shard, push
from support.steps import Worker, join


class Small(NamedTuple):
    """A log with a checkpoint.

    Attributes:
        directory: Where it lies.
        states: State of the shard and of the control plane, and limits of rows, by the newest lsn at that time.
        contents: The used parts of its segments, by name, in order.
    """

    directory: Path
    states: dict[int, tuple[Any, ...]]
    contents: dict[str, bytes]

    @property
    def last(self) -> str:
        """Name of the last segment."""
        return [*self.contents][-1]


def written(directory: Path, segment_bytes: int) -> Small:
    """Writes the log of a sync job whose steps are clipped, or not, behind a checkpoint."""
    shard, states = logged_shard(directory, SGD, DENSE, segment_bytes=segment_bytes), {}
    FrameClient(shard).ask(Op.ASSIGN, assign(DENSE, floats(*range(8))))
    write_checkpoint(shard)

    def note() -> None:
        assert shard.log is not None
        shard.log.writer.sync()  # the records behind say so: only the last one may be torn
        # What is staged is in no record.
        state = state_of(shard), shard.log.control.to_builtins(), dict(shard.log.max_rows)
        states.setdefault(shard.log.writer.newest_lsn, state)

    note()
    workers = [Worker(shard, index) for index in range(2)]
    for worker in workers:
        join(worker, 2, Mode(SYNC), begins_job=worker.index == 0)
        note()
    for step in range(1, 4):
        for worker in workers:
            gradients = push(SGD, ids_of(1, worker.index + 2), floats([step, 1.0], [1.0, 2.0]))
            worker.ask(Op.PREPARE if step == 2 else Op.PUSH, gradients)
            note()
        for worker in workers if step == 2 else ():
            half = Block(Action.FACTORS, SGD.table_id, SGD.schema_hash, 1, 1, None, floats([0.5]))
            worker.ask(Op.COMMIT, half)
            worker.step += 1
            note()
    shard.commit([], [DayEnd(SGD.table_id)])
    note()
    shard.shrink([Criterion(MIN_NORM, 2.0)])
    note()
    for worker in workers:
        worker.ask(Op.LEAVE)
        note()
    write_other_kinds(shard, note)
    close(shard)
    reader = LogReader(directory)
    assert {record.head.kind for record in reader.records()} == {*Kind}
    reader.cut_off()
    return Small(directory, states, {path.name: path.read_bytes() for path in reader.paths})


def write_other_kinds(shard: Shard, note: Callable[[], None]) -> None:
    """Writes records of the kinds that no step has, and notes the state behind each."""
    log = shard.log
    assert log is not None
    shard.add_table(ADAM, declared_by="worker 1")
    note()
    staging = make_shard(SGD)
    FrameClient(staging).push(push(SGD, ids_of(5, 6), floats([1.0, 2.0], [3.0, 4.0])))
    load_into(shard, staging)
    note()
    for max_rows in (2, UNLIMITED):
        changes = [Push(SGD.table_id, ids_of(5, 7), floats([1.0, 1.0], [1.0, 1.0]), 0.5, 2)]
        log.commit([], changes, NO_PROGRESS, [], {SGD.table_id: max_rows})
        log.void()
        note()
    changes_of_control: list[ControlChange] = [
        RegisteredWorker(0, 1, CLIENT, 1, None, 5, ("a", "b", "c"), True, 1, True, 7),
        BarrierOpening("a barrier", {0: 1}, contributions=((b"abc",),)),
        ReportedProgress(0, 3, '{"epoch": 1}'),
        LineageChange("model", saved=2),
    ]
    for change in changes_of_control:
        log.note(change)
        note()
    log.cut_save(CutSave("a save", False, ()), {})
    note()
    log.end_save("a save", None)
    note()
    log.note_changed(SGD, ids_of(5), is_removed=False)
    shard.tables[SGD.table_id].table.restore_changes(ids_of(5), is_removed=False, is_counter=False)
    note()


@pytest.fixture(scope="module", params=[1 << 14, 1024], ids=["one segment", "several segments"])
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Small:
    made = written(tmp_path_factory.mktemp("small") / "log", request.param)
    assert (len(made.contents) > 2) is (request.param == 1024)
    return made


def newest_of(small: Small, directory: Path, name: str, content: bytes) -> int:
    """Recovers from the log with another content of a segment; returns the newest lsn, -1 if it is refused."""
    segment = directory / name
    segment.write_bytes(content)
    shard = make_shard()
    try:
        replayed = recover(shard, directory)
        assert replayed is not None
        newest_lsn = replayed.newest_lsn
        expected = small.states.get(newest_lsn)
        assert expected is None or (state_of(shard), replayed.control.to_builtins(), replayed.max_rows) == expected
        return newest_lsn
    except LogCorrupt:
        return -1
    finally:
        shard.close()
        segment.write_bytes(small.contents[name])


@pytest.fixture
def damaged(small: Small, tmp_path: Path) -> Path:
    """A copy of the log."""
    return shutil.copytree(small.directory, tmp_path / "log")


@pytest.mark.guarantee("W4")
@pytest.mark.parametrize("stride", [61, pytest.param(1, marks=pytest.mark.slow)])
def test_a_cut_log_gives_the_state_of_a_prefix(small: Small, damaged: Path, stride: int) -> None:
    content = small.contents[small.last]
    lengths = [*range(0, len(content), stride), len(content)]
    found = [newest_of(small, damaged, small.last, content[:length]) for length in lengths]
    assert found == sorted(found)
    assert found[-1] == max(small.states)


@pytest.mark.guarantee("W4")
@pytest.mark.parametrize("stride", [61, pytest.param(1, marks=pytest.mark.slow)])
def test_a_cut_of_a_segment_that_others_follow_is_refused(small: Small, damaged: Path, stride: int) -> None:
    for name, content in small.contents.items():
        if name != small.last:
            found = {newest_of(small, damaged, name, content[:length]) for length in range(0, len(content), stride)}
            assert found == {-1}


@pytest.mark.guarantee("W4")
def test_a_log_without_its_last_segments_gives_a_prefix(small: Small, damaged: Path) -> None:
    names, found = [*small.contents], []
    for name in names[:0:-1]:
        (damaged / name).unlink()
        before = names[names.index(name) - 1]
        found.append(newest_of(small, damaged, before, small.contents[before]))
    assert found == [int(name.removesuffix(".fsl")) - 1 for name in names[:0:-1]]


@pytest.mark.guarantee("W4")
@pytest.mark.parametrize("num_flips", [150, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_flipped_bit_gives_the_state_of_a_prefix(small: Small, damaged: Path, num_flips: int) -> None:
    generator, refused, found = random.Random(7), 0, [-1]
    for _ in range(num_flips):
        name = generator.choice([*small.contents])
        changed = bytearray(small.contents[name])
        bit = generator.randrange(8 * len(changed))
        changed[bit // 8] ^= 1 << bit % 8
        newest_lsn = newest_of(small, damaged, name, changed)
        assert newest_lsn == -1 or name == small.last
        refused += newest_lsn == -1
        found.append(newest_lsn)
    assert max(found) < max(small.states)  # nothing that was changed is taken for whole
    assert refused > num_flips / 2
