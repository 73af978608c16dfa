"""Workers that were replaced are forgotten two saves later, and nothing that they sent is applied after that."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import pytest

from fleet_sparse.core.mode import ASYNC, SYNC, Mode
from fleet_sparse.core.watermark import Watermark
from fleet_sparse.errors import ErrorCode
from fleet_sparse.pserver.admin.snapshot_writer import Save
from fleet_sparse.pserver.engine.departed import DepartedClients
from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.wire.frame_format import Op
from support.shards import SGD, FrameClient, code_of, floats, ids_of, make_shard, message_of, pull, push

FIRST, SECOND, THIRD = (bytes([number]) * 16 for number in range(3))
NUM_CLIENTS = 100_000


@pytest.fixture
def shard() -> Iterator[Shard]:
    """A shard as of a pserver process, with a table."""
    made = make_shard(SGD, only_registered=True)
    yield made
    made.close()


def join(shard: Shard, client_id: bytes, mode: Mode | None = None) -> FrameClient[Shard]:
    """Returns a client that takes the place of worker 0."""
    shard.join(0, 1, client_id, mode, begins_job=True)
    return FrameClient(shard, client_id)


def train(client: FrameClient[Shard]) -> None:
    assert code_of(client.push(push(SGD, ids_of(7), floats([1, 1])))) is None


def save(shard: Shard, *, tables: tuple[str, ...] = (), committed_as: int | None = 5) -> None:
    made = Save(shard, "a", base=None, tables=tables, is_logged=True)
    assert made.cut()
    made.end(committed_as)


def again(client: FrameClient[Shard]) -> ErrorCode | None:
    """Sends the newest push a second time."""
    frame = push(SGD, ids_of(7), floats([1, 1]))
    return code_of(client.push(frame, push_seq=client.seq))


def test_clients_are_kept_until_the_second_save() -> None:
    departed = DepartedClients()
    departed.add([FIRST])
    assert departed.pass_save() == set()
    departed.add([FIRST, SECOND])
    assert departed.pass_save() == {FIRST}
    assert SECOND in departed
    assert departed.pass_save() == {SECOND}
    assert SECOND not in departed


def test_client_that_returned_is_not_departed() -> None:
    departed = DepartedClients(earlier=[FIRST])
    departed.discard(FIRST)
    assert departed.pass_save() == set()


@pytest.mark.parametrize("mode", [None, Mode(ASYNC)])
def test_watermark_is_dropped_at_the_second_save(shard: Shard, mode: Mode | None) -> None:
    train(join(shard, FIRST, mode))
    train(join(shard, SECOND, mode))
    both = [Watermark(FIRST, 1, 1), Watermark(SECOND, 1, 1)]
    assert shard.ledger.watermarks() == both
    save(shard)
    assert (shard.ledger.watermarks(), shard.knows(FIRST)) == (both, True)
    save(shard)
    assert (shard.ledger.watermarks(), shard.knows(FIRST)) == (both[1:], False)


def test_late_push_of_a_forgotten_client_is_refused(shard: Shard) -> None:
    late = join(shard, FIRST)
    train(late)
    rows = join(shard, SECOND).rows(SGD, 7)
    save(shard)
    assert again(late) is ErrorCode.STALE_EPOCH
    save(shard)
    assert again(late) is ErrorCode.FORBIDDEN
    assert message_of(late.push(push(SGD, ids_of(7), floats([1, 1])))) == "unregistered PUSH"
    assert code_of(late.ask(Op.PULL, pull(SGD, ids_of(7)))) is ErrorCode.FORBIDDEN
    assert FrameClient(shard, SECOND).rows(SGD, 7) == rows


def test_worker_of_the_job_is_never_forgotten(shard: Shard) -> None:
    client = join(shard, FIRST)
    train(client)
    for _ in range(4):
        save(shard)
    assert again(client) is None
    assert client.rows(SGD, 7) == [[-0.5, -0.5]], "it was applied once"


def test_client_that_takes_its_place_back_is_kept(shard: Shard) -> None:
    client = join(shard, FIRST)
    train(client)
    join(shard, SECOND)
    save(shard)
    join(shard, FIRST)
    save(shard)
    save(shard)
    assert again(client) is None
    assert client.rows(SGD, 7) == [[-0.5, -0.5]], "it was applied once"


@pytest.mark.parametrize("changes", [{"tables": ("sgd",)}, {"committed_as": None}])
def test_save_of_some_tables_or_none_forgets_nobody(shard: Shard, changes: dict[str, object]) -> None:
    train(join(shard, FIRST))
    join(shard, SECOND)
    for _ in range(3):
        save(shard, **changes)  # type: ignore[arg-type]
    assert shard.knows(FIRST)
    assert len(shard.ledger.watermarks()) == 1


def test_staged_push_of_a_replaced_worker_is_forgotten_too(shard: Shard) -> None:
    shard.join(0, 2, FIRST, Mode(SYNC), begins_job=True)
    shard.join(1, 2, THIRD, Mode(SYNC), begins_job=False)
    client = FrameClient(shard, FIRST)
    assert code_of(client.push(push(SGD, ids_of(7), floats([1, 1])), step=1)) is None
    assert shard.ledger.has_staged(FIRST)
    shard.join(0, 2, SECOND, Mode(SYNC), begins_job=False)
    save(shard)
    assert shard.ledger.has_staged(FIRST)
    save(shard)
    assert not shard.ledger.has_staged(FIRST)
    other = FrameClient(shard, THIRD).push(push(SGD, ids_of(7), floats([1, 1])), step=1)
    assert code_of(other) is ErrorCode.WORKER_LOST, "the step has failed"


def test_shard_that_admits_anyone_forgets_nobody() -> None:
    shard = make_shard(SGD)
    late = join(shard, FIRST)
    train(late)
    join(shard, SECOND)
    save(shard)
    save(shard)
    assert again(late) is ErrorCode.STALE_EPOCH
    shard.close()


def test_clients_of_a_snapshot_that_stay_away_are_forgotten(shard: Shard) -> None:
    shard.expect([Watermark(FIRST, 1, 3), Watermark(SECOND, 1, 4)])
    join(shard, SECOND)
    save(shard)
    save(shard)
    assert shard.ledger.watermarks() == [Watermark(SECOND, 1, 4)]


def test_memory_of_clients_that_went_is_given_back(shard: Shard) -> None:
    join(shard, FIRST)
    save(shard)
    tracemalloc.start()
    try:
        for number in range(NUM_CLIENTS):
            client_id = number.to_bytes(16, "big")
            shard.join(0, 1, client_id, None, begins_job=True)
            shard.commit([Watermark(client_id, 1, 1)], [])
        taken = tracemalloc.get_traced_memory()[0]
        save(shard)
        save(shard)
        left = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken > 100 * NUM_CLIENTS
    assert left < 1 << 20
    assert [mark.client_id for mark in shard.ledger.watermarks()] == [client_id]
