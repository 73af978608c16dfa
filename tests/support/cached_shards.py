"""Workers that cache the rows of one table of shards, and speak frames as bytes to these."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.mode import Mode
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.row_bound import ROW_FOLLOWS, STATES_FOLLOW
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.pserver.net import protocol
from fleet_sparse.wire.decode import decode
from fleet_sparse.wire.encode import encode
from fleet_sparse.wire.frame_format import Action, Block, Frame, Op
from fleet_sparse.worker.rows.cache_job import CacheJob
from fleet_sparse.worker.rows.cache_step import Answer, Changes, Outgoing, Plan
from fleet_sparse.worker.rows.cached_table import CachedTable

from .cached_jobs import Step
from .shards import make_shard, pull, push
from .steps import Worker, join

MAX_BYTES = 1 << 20
_NO_IDS = np.empty(0, np.int64)


def ask_block(spec: TableSpec, ids: NDArray[np.int64], versions: NDArray[np.uint32]) -> Block:
    """Returns a PULL block that asks about copies."""
    return pull(spec, ids, copies={"versions": versions})


def change_block(spec: TableSpec, changes: Changes, step: int, weight: float = 1.0) -> Block:
    """Returns a CHANGE block."""
    block = push(spec, changes.ids, changes.rows, learning_rate=weight, optimizer_step=step)
    block.action, block.statistics = Action.CHANGE, {"counts": changes.amounts}
    if changes.states.shape[1]:
        block.copies = {"versions": changes.num_updates, "states": changes.states}
    return block


def row_assignment_block(spec: TableSpec, changes: Changes, step: int) -> Block:
    """Returns an ASSIGN block of rows."""
    block = push(spec, changes.ids, changes.rows, optimizer_step=step)
    block.action = Action.ASSIGN
    if changes.states.shape[1]:
        block.copies = {"states": changes.states}
    return block


def through_bytes(frame: Frame) -> Frame:
    """Returns the frame that the other side reads."""
    return decode(encode(frame), max_bytes=MAX_BYTES)


def answer_from(blocks: list[Block], spec: TableSpec) -> Answer:
    """Returns the answer to one ask, whose blocks these are."""
    num_states, dim = spec.update_rule.num_states, spec.dim
    slack = np.empty(0, np.uint8)
    states = np.empty((0, num_states, dim), np.float32)
    by_code = {code: (np.empty((0, dim), np.float32), np.empty(0, np.uint32)) for code in (ROW_FOLLOWS, STATES_FOLLOW)}
    for block in blocks:
        if block.rows is None:
            slack = block.copies["slack"]
            continue
        has_states = "states" in block.copies
        by_code[STATES_FOLLOW if has_states else ROW_FOLLOWS] = block.rows, block.copies["versions"]  # type: ignore[assignment]
        states = block.copies.get("states", states)
    follows = slack[slack >= ROW_FOLLOWS]
    rows, versions = np.empty((len(follows), dim), np.float32), np.empty(len(follows), np.uint32)
    for code, (its_rows, its_versions) in by_code.items():
        rows[follows == code], versions[follows == code] = its_rows, its_versions
    return Answer(slack, rows, versions, states)


class CachedShards:
    """As `CachedJob`, with shards for the pservers. In sync mode a step is complete once all workers updated.

    Args:
        mode: Mode of the job; its bound is that of `job`.
        job: What the caches share.
        capacity: Number of copies of each worker.
        spec: The table, of rule "sgd" or another one.
        num_shards: Number of shards.
        learning_rate: Learning rate of all updates.

    Attributes:
        tables: The cache of each worker.
        shards: The shards.
        workers: By worker and shard.
    """

    def __init__(
        self,
        mode: Mode,
        job: CacheJob,
        capacity: int,
        spec: TableSpec,
        num_shards: int = 1,
        *,
        learning_rate: float = 1.0,
    ) -> None:
        self.spec, self.mode, self._learning_rate = spec, mode, learning_rate
        self._is_single = job.num_workers == 1
        self.tables = [CachedTable(spec, capacity, job) for _ in range(job.num_workers)]
        self.shards = [make_shard(spec, shard=shard, num_shards=num_shards) for shard in range(num_shards)]
        self.workers = [[Worker(shard, index) for shard in self.shards] for index in range(job.num_workers)]
        for of_worker in self.workers:
            for worker in of_worker:
                join(worker, job.num_workers, mode, begins_job=worker.index == 0)
        self._placement = Placement.even(num_shards)
        self.num_updates = [0] * job.num_workers

    def close(self) -> None:
        for shard in self.shards:
            shard.close()

    def places(self, shard: Shard, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the places of the ids that a shard owns."""
        return np.flatnonzero(self._placement.shard_of(ids, self.spec.salt) == shard.shard_index)

    def send(self, worker: Worker[Shard], op: Op, *blocks: Block, **header: Any) -> Frame:
        """Returns the reply to a request of a worker to a shard."""
        if not self.mode.is_step_synchronized:
            header["step"] = 0
        frame = worker.frame(op, *blocks, **header)
        reply = through_bytes(protocol.answer(worker.shard, through_bytes(frame)))
        assert reply.error is None, reply.error
        for late in protocol.take_deferred_replies(worker.shard):
            assert late.error is None, late.error
        return reply

    def read(self, worker: int, ids: NDArray[np.int64], step: int) -> Step:
        """Reads the rows of a batch, with one PULL for each shard."""
        table = self.tables[worker]
        plan = table.plan(ids, step)
        out = np.full((len(ids), self.spec.dim), np.nan, np.float32)
        return Step(plan, table.take(plan, self._answered(worker, plan, out), out), out)

    def _answered(self, worker: int, plan: Plan, out: NDArray[np.float32]) -> Answer:
        asked_ids, plain_ids = plan.ids[plan.asked], plan.ids[plan.plain]
        slack = np.empty(len(asked_ids), np.uint8)
        rows = np.empty((len(asked_ids), self.spec.dim), np.float32)
        versions = np.empty(len(asked_ids), np.uint32)
        states = np.empty((len(asked_ids), self.spec.update_rule.num_states, self.spec.dim), np.float32)
        for client in self.workers[worker]:
            plain, asked = self.places(client.shard, plain_ids), self.places(client.shard, asked_ids)
            blocks = [pull(self.spec, plain_ids[plain])]
            if len(asked):
                blocks.append(ask_block(self.spec, asked_ids[asked], plan.versions[asked]))
            reply = self.send(client, Op.PULL, *blocks)
            assert reply.header.op is Op.ROWS, reply
            assert all(block.count for block in reply.blocks[1:])
            out[plan.plain[plain]] = reply.blocks[0].rows
            if len(asked):
                answer = answer_from(reply.blocks[1:], self.spec)
                slack[asked] = answer.slack
                due = asked[answer.slack >= ROW_FOLLOWS]
                rows[due], versions[due] = answer.rows, answer.versions
                states[asked[answer.slack == STATES_FOLLOW]] = answer.states
        is_due = slack >= ROW_FOLLOWS
        return Answer(slack, rows[is_due], versions[is_due], states[slack == STATES_FOLLOW])

    def update(self, worker: int, step: Step, grads: NDArray[np.float32]) -> Outgoing:
        """Trains the rows of a step and pushes what is due, with one PUSH for each shard."""
        self.num_updates[worker] += 1
        number = self.num_updates[worker]
        outgoing = self.tables[worker].apply(step.plan, step.arrived, grads, self._learning_rate, number)
        places = outgoing.as_gradients
        self._push(worker, step.plan.ids[places], grads[places], outgoing)
        return outgoing

    def flush(self, worker: int) -> None:
        """Sends all that a worker holds. Where steps are counted this is a step, too: all workers have to flush."""
        outgoing = self.tables[worker].flush()
        self._push(worker, _NO_IDS, np.empty((0, self.spec.dim), np.float32), outgoing)

    def _push(self, worker: int, ids: NDArray[np.int64], grads: NDArray[np.float32], outgoing: Outgoing) -> None:
        number = max(self.num_updates[worker], 1)
        for client in self.workers[worker]:
            mine = self.places(client.shard, ids)
            numbers = {"learning_rate": self._learning_rate, "optimizer_step": number}
            blocks = [push(self.spec, ids[mine], grads[mine], **numbers)]  # type: ignore[arg-type]
            for changes in outgoing.changes:
                of_shard = _changes_at(changes, self.places(client.shard, changes.ids))
                if self._is_single:
                    blocks.append(row_assignment_block(self.spec, of_shard, number))
                else:
                    blocks.append(change_block(self.spec, of_shard, number))
            self.send(client, Op.PUSH, *blocks)
        self.tables[worker].sent(outgoing)

    def rows_of(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns the rows that the shards have."""
        rows = np.empty((len(ids), self.spec.dim), np.float32)
        for shard in self.shards:
            places = self.places(shard, ids)
            rows[places] = shard.tables[self.spec.table_id].table.pull(pull(self.spec, ids[places]))
        return rows


def _changes_at(changes: Changes, places: NDArray[np.int64]) -> Changes:
    return Changes(*(np.ascontiguousarray(each[places]) for each in changes))
