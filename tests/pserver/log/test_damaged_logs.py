"""A log of all kinds of changes that is cut or changed gives a prefix of the changes, or it is refused."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fleet_sparse.core.criteria import MIN_NORM, Criterion
from fleet_sparse.core.mode import SYNC, Mode
from fleet_sparse.errors import LogCorrupt
from fleet_sparse.pserver.admin.log_recovery import recover, write_checkpoint
from fleet_sparse.pserver.log.log_format import Kind
from fleet_sparse.pserver.log.log_reader import LogReader
from fleet_sparse.pserver.tables.mutations import DayEnd
from fleet_sparse.wire.frame_format import Action, Block, Op
from support.logs import close, logged_shard, state_of
from support.shards import DENSE, SGD, FrameClient, assign, floats, ids_of, make_shard, push
from support.steps import Worker, join


class Small(NamedTuple):
    """A log with a checkpoint and one segment.

    Attributes:
        directory: Where it lies.
        states: State of the shard by the newest lsn at that time.
    """

    directory: Path
    states: dict[int, Any]


def written(directory: Path) -> Small:
    """Writes the log of a sync job whose steps are clipped, or not, behind a checkpoint."""
    shard, states = logged_shard(directory, SGD, DENSE, segment_bytes=1 << 14), {}
    FrameClient(shard).ask(Op.ASSIGN, assign(DENSE, floats(*range(8))))
    write_checkpoint(shard)

    def note() -> None:
        assert shard.log is not None
        states.setdefault(shard.log.writer.newest_lsn, state_of(shard))  # what is staged is in no record

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
    close(shard)
    reader = LogReader(directory)
    kinds = {record.head.kind for record in reader.records()}
    reader.cut_off()
    assert kinds >= {
        Kind.STATE,
        Kind.JOIN,
        Kind.APPLY,
        Kind.PREPARE,
        Kind.COMMIT,
        Kind.SHRINK,
        Kind.END_DAY,
        Kind.REJOIN,
    }
    return Small(directory, states)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return written(tmp_path_factory.mktemp("small") / "log")


def newest_of(small: Small, directory: Path, content: bytes) -> int:
    """Recovers from the log with another content of its segment; returns the newest lsn, -1 if it is refused."""
    (segment,) = LogReader(small.directory).paths
    (directory / segment.name).write_bytes(content)
    shard = make_shard()
    try:
        replayed = recover(shard, directory)
        assert replayed is not None
        newest_lsn = replayed.end_lsn - 1
        expected = small.states.get(newest_lsn)
        assert expected is None or state_of(shard) == expected
        return newest_lsn
    except LogCorrupt:
        return -1
    finally:
        shard.close()


@pytest.fixture
def damaged(small: Small, tmp_path: Path) -> Path:
    """A copy of the log."""
    return shutil.copytree(small.directory, tmp_path / "log")


def content_of(small: Small) -> bytes:
    (segment,) = LogReader(small.directory).paths
    return segment.read_bytes()


@pytest.mark.guarantee("W4")
@pytest.mark.parametrize("stride", [61, pytest.param(1, marks=pytest.mark.slow)])
def test_a_cut_log_gives_the_state_of_a_prefix(small: Small, damaged: Path, stride: int) -> None:
    content = content_of(small)
    found = [newest_of(small, damaged, content[:length]) for length in [*range(0, len(content), stride), len(content)]]
    assert found == sorted(found)
    assert found[-1] == max(small.states)


@pytest.mark.guarantee("W4")
@pytest.mark.parametrize("num_flips", [150, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_flipped_bit_gives_the_state_of_a_prefix(small: Small, damaged: Path, num_flips: int) -> None:
    content, generator, found = content_of(small), random.Random(7), []
    for _ in range(num_flips):
        changed = bytearray(content)
        bit = generator.randrange(8 * len(changed))
        changed[bit // 8] ^= 1 << bit % 8
        found.append(newest_of(small, damaged, changed))
    assert max(found) < max(small.states)  # nothing that was changed is taken for whole
    assert found.count(-1) > num_flips / 2
