"""A shard that threads of one process call."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from fleet_sparse.errors import ErrorCode, FleetSparseError
from fleet_sparse.pserver.engine.reply import DeferredReply, Reply
from fleet_sparse.pserver.refusal import Refusal
from fleet_sparse.pserver.shared_shard import SharedShard
from fleet_sparse.wire.frame_format import Op
from support.shards import SGD, FrameClient, floats, ids_of, make_shard, pull, push
from support.steps import SYNC_MODE, make_job


class Mailbox:
    """A shared shard of a sync job of two workers, and what it delivers."""

    def __init__(self) -> None:
        self.shard, self.workers = make_job(SYNC_MODE, 2, SGD)
        self.delivered: list[DeferredReply] = []
        self.shared = SharedShard(self.shard, self.delivered.append)

    def push(self, worker: int) -> Reply:
        frame = self.workers[worker].frame(Op.PUSH, push(SGD, ids_of(7), floats([1, 1])))
        return self.shared.execute(frame.header, frame.blocks, (), 16, 0)


def test_shared_shard_delivers_replies_to_other_clients() -> None:
    mailbox = Mailbox()
    assert mailbox.push(0).op is Op.WAIT
    assert mailbox.delivered == []
    assert mailbox.push(1).op is Op.ACK
    ((header, outcome),) = mailbox.delivered
    assert header.client_id == mailbox.workers[0].client_id
    assert isinstance(outcome, Reply)
    assert outcome.op is Op.ACK


def test_shared_shard_delivers_after_a_refusal() -> None:
    mailbox = Mailbox()
    mailbox.push(0)
    frame = mailbox.workers[1].frame(Op.PUSH, push(SGD, ids_of(7), floats([np.nan, 1])))
    with pytest.raises(Refusal):
        mailbox.shared.execute(frame.header, frame.blocks, (), 0, 0)
    ((_, outcome),) = mailbox.delivered
    assert isinstance(outcome, Refusal)
    assert outcome.error.code is ErrorCode.STEP_FAILED


def test_shared_shard_delivers_what_a_task_releases() -> None:
    mailbox = Mailbox()
    mailbox.push(0)
    mailbox.shared.run(partial(mailbox.shard.evict_worker, 1, "a reason"))
    ((_, outcome),) = mailbox.delivered
    assert isinstance(outcome, Refusal)
    assert outcome.error.code is ErrorCode.WORKER_LOST


def test_shared_shard_that_is_closed_says_so() -> None:
    mailbox = Mailbox()
    mailbox.shared.close()
    mailbox.shared.close()
    with pytest.raises(FleetSparseError, match="embedded pserver: it is closed"):
        mailbox.push(0)
    with pytest.raises(FleetSparseError, match="embedded pserver: it is closed"):
        mailbox.shared.run(lambda: None)


def test_shared_shard_counts_requests_and_bytes() -> None:
    mailbox = Mailbox()
    mailbox.push(0)
    assert mailbox.shard.counters.num_requests == 1
    assert (mailbox.shared.traffic.bytes_received, mailbox.shared.traffic.bytes_sent) == (16, 0)


def test_rows_are_written_to_the_memory_of_the_caller() -> None:
    shard = make_shard(SGD)
    frame = FrameClient(shard).frame(Op.PULL, pull(SGD, ids_of(7, 8)), pull(SGD, ids_of(7)))
    place = np.zeros((2, SGD.dim), np.float32)
    reply = SharedShard(shard, lambda reply: None).execute(frame.header, frame.blocks, (place, None), 0, 0)
    assert [block.count for block in reply.blocks] == [1]
    assert place[0].tolist() == reply.blocks[0].rows[0].tolist() == [0.5, 0.5]
    shard.close()
