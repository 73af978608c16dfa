"""Which clients may push to a shard, and pull from it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fleet_sparse.core.placement import Placement
from fleet_sparse.errors import ErrorCode
from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.wire.frame_format import Op
from support.shards import CLUSTER, INCARNATION, SGD, FrameClient, code_of, floats, ids_of, message_of, pull, push

WORKER, OTHER, VISITOR = (bytes([number]) * 16 for number in range(3))


@pytest.fixture
def shard() -> Iterator[Shard]:
    """A shard as of a pserver process, with a table and a worker."""
    made = Shard(
        0,
        1,
        cluster_id=CLUSTER,
        incarnation=INCARNATION,
        placement=Placement.even(1),
        huge_pages=False,
        only_registered=True,
    )
    made.add_table(SGD)
    made.join(0, 1, WORKER, None, begins_job=True)
    yield made
    made.close()


def pushes(shard: Shard, client_id: bytes) -> ErrorCode | None:
    return code_of(FrameClient(shard, client_id).push(push(SGD, ids_of(7), floats([1, 1]))))


def pulls(shard: Shard, client_id: bytes) -> ErrorCode | None:
    return code_of(FrameClient(shard, client_id).ask(Op.PULL, pull(SGD, ids_of(7))))


def test_a_worker_pushes_and_pulls(shard: Shard) -> None:
    assert (pushes(shard, WORKER), pulls(shard, WORKER)) == (None, None)


@pytest.mark.parametrize("op", [Op.PULL, Op.PUSH, Op.PUSH_PULL, Op.ASSIGN])
def test_a_client_that_did_not_register_is_refused(shard: Shard, op: Op) -> None:
    refusal = FrameClient(shard, OTHER).ask(op)
    assert (code_of(refusal), message_of(refusal)) == (ErrorCode.FORBIDDEN, f"unregistered {op.name}")


def test_clients_that_did_not_register_take_no_place(shard: Shard) -> None:
    for number in range(10, 60):
        assert pushes(shard, bytes([number]) * 16) is ErrorCode.FORBIDDEN
    assert shard.ledger.watermarks() == []
    assert shard.states()[0].num_rows == 0


def test_a_visitor_pulls_and_does_not_push(shard: Shard) -> None:
    shard.visit(VISITOR)
    assert (pushes(shard, VISITOR), pulls(shard, VISITOR)) == (ErrorCode.FORBIDDEN, None)


def test_a_visitor_that_becomes_a_worker_pushes(shard: Shard) -> None:
    shard.visit(VISITOR)
    shard.join(1, 2, VISITOR, None, begins_job=False)
    assert pushes(shard, VISITOR) is None


@pytest.mark.parametrize("begins_job", [False, True])
def test_a_replaced_worker_pushes_no_more(shard: Shard, begins_job: bool) -> None:
    shard.join(0, 1, OTHER, None, begins_job=begins_job)
    assert (pushes(shard, WORKER), pushes(shard, OTHER)) == (ErrorCode.STALE_EPOCH, None)
