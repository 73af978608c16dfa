"""Power cuts of a pserver with a log while two workers train in sync mode: they end as if there had been none."""

from __future__ import annotations

import random
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_sparse.core.dense_spec import DenseSpec, Segment
from fleet_sparse.core.initializer import constant
from fleet_sparse.core.mode import SYNC, Mode
from fleet_sparse.core.rules import RULES
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.pserver.net.protocol import deferred_reply
from fleet_sparse.settings import Settings
from fleet_sparse.wire.decode import decode
from fleet_sparse.wire.frame_format import PUSHES, Action, Block, Frame, Op
from fleet_sparse.worker.net.request import Request
from fleet_sparse.worker.net.shard_link import ClientIdentity, Outcome, Registration, ShardLink
from support.logs import close, logged_shard, state_of
from support.power_loss import PowerLoss
from support.shards import CLUSTER, answer, assign, floats, pull, push

# The log's own thread ends with the process.
pytestmark = pytest.mark.filterwarnings("ignore:Exception in thread fleet_sparse log")
NUM_STEPS = 9
STEPS_BETWEEN_BARRIERS = 4
LEARNING_RATE = 0.125
OF_TABLES_ALONE = {"ctr_adagrad"}
TRAINED = sorted(name for name, rule in RULES.items() if rule.trains and rule.kernel is not None)
"""Every rule of an optimizer: all are trained in the same steps, each with a table and a dense array."""
TABLES = [TableSpec(name=f"{rule}.rows", dim=2, rule=rule, initializer=constant(0.5)) for rule in TRAINED]
ARRAYS = [
    DenseSpec(f"{rule}.values", rule, (), (Segment("w", 0, 5, 1.0), Segment("b", 5, 3, 2.0)))
    for rule in TRAINED
    if rule not in OF_TABLES_ALONE
]


def request_of(op: Op, step: int, *blocks: Block) -> Request:
    request = Request(op, step)
    for block in blocks:
        is_pull = block.action is Action.PULL
        request.add(block, [np.empty((block.count, block.dim), np.float32)] if is_pull else None)
    return request


class Trainer:
    """A worker that trains: it asks one request after the other, as a real one does.

    Attributes:
        is_done: True once all steps are trained and both workers have left.
    """

    def __init__(self, index: int, *, clips: bool) -> None:
        self.index = index
        self.client_id = bytes([index + 1]) * 16
        self.is_done = False
        self._rng = np.random.default_rng(index)
        self._clips = clips
        self._asks = self._training()

    def next_request(self, outcome: Outcome | None) -> Request | None:
        """Returns the request after the one with this outcome; None after the last."""
        try:
            return next(self._asks) if outcome is None else self._asks.send(outcome)
        except StopIteration:
            self.is_done = True
            return None

    def _training(self) -> Any:
        if self.index == 0:
            yield request_of(Op.ASSIGN, 0, *(assign(each, floats(*range(8))) for each in ARRAYS))
        yield request_of(Op.LEAVE, 0)
        for step in range(1, NUM_STEPS + 1):
            ids = self._rng.permutation(6)[:3]
            pulled = request_of(Op.PULL, step, *(pull(each, ids) for each in TABLES))
            yield pulled
            blocks = [self._push(each, ids, outs[0], step) for each, outs in zip(TABLES, pulled.outs, strict=True)]
            blocks += [self._push(each, None, np.zeros((8, 1), np.float32), step) for each in ARRAYS]
            pulls = [pull(each, ids) for each in TABLES]
            if self._clips:
                prepared = yield request_of(Op.PREPARE, step, *blocks)
                factors = [self._factors(block) for block in prepared.reply.blocks]
                yield request_of(Op.COMMIT, step, *factors, *pulls)
            else:
                yield request_of(Op.PUSH_PULL, step, *blocks, *pulls)
            if step % STEPS_BETWEEN_BARRIERS == 0:
                yield request_of(Op.LEAVE, 0)
        yield request_of(Op.LEAVE, 0)

    def _push(self, spec: TableSpec | DenseSpec, ids: Any, rows: Any, step: int) -> Block:
        """Returns gradients of the values with noise."""
        grads = rows + self._rng.standard_normal(rows.shape).astype(np.float32)
        return push(spec, ids, grads, learning_rate=LEARNING_RATE, optimizer_step=step)

    @staticmethod
    def _factors(norms: Block) -> Block:
        assert norms.rows is not None
        sums = norms.rows.view(np.float64)
        values = (1.0 / (1.0 + sums)).astype(np.float32)
        return Block(Action.FACTORS, norms.table_id, norms.schema_hash, 1, len(values), None, values)


class World:
    """A shard with a log, two workers, their links and the frames on their way.

    With durability `sync` replies to pushes are held until the next sync, as a data plane holds them.
    """

    def __init__(self, directory: Path, *, clips: bool, durability: str = "log") -> None:
        self._directory = directory
        self._durability = durability
        self._held: list[tuple[int, Frame]] = []  # with the worker
        self._num_cuts = 0
        self._disks = ExitStack()
        self._disk = self._new_disk(directory)
        self.now = 0.0
        self.shard = self._begin()
        self.trainers = [Trainer(index, clips=clips) for index in range(2)]
        mode = Mode(SYNC)
        for each in self.trainers:
            self.shard.join(each.index, 2, each.client_id, mode, begins_job=each.index == 0)
        self.sync()  # a registration is durable before it is answered
        values = Settings(deadline_s=1e6, failover_s=1e6, barrier_s=1e6)
        self.links = [
            ShardLink(self._registration(0), ClientIdentity(each.client_id), values) for each in self.trainers
        ]
        self.frames: list[deque[Request]] = [deque() for _ in self.trainers]
        for each in self.trainers:
            self._ask(each.index, None)

    def serve(self, worker: int) -> None:
        """The shard answers the oldest frame of a worker."""
        if not self.frames[worker]:
            return
        request, link = self.frames[worker].popleft(), self.links[worker]
        request.encode()
        sizes = sum(map(len, request.columns))
        position = request.request_id, request.push_seq, request.push_floor, request.step
        head = link.header.head_of(
            request.op, request.table, request.columns, sizes, position, request.part, request.num_parts
        )
        frame = decode([head, *map(bytes, request.columns)], max_bytes=1 << 20)
        self._reply(worker, frame.header.op, answer(self.shard, frame))
        for late in self.shard.take_deferred_replies():
            (other,) = [each.index for each in self.trainers if each.client_id == late.header.client_id]
            self._reply(other, late.header.op, deferred_reply(self.shard, late))

    def _reply(self, worker: int, op: Op, reply: Frame) -> None:
        if self._durability == "sync" and op in PUSHES:
            self._held.append((worker, reply))
        else:
            self._receive(worker, reply)

    def sync(self) -> None:
        assert self.shard.log is not None
        self.shard.log.writer.sync()
        held, self._held = self._held, []
        for worker, reply in held:
            self._receive(worker, reply)

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        close(self.shard)
        self._disks.close()

    def lose_power(self, seed: int) -> None:
        """Ends the pserver with its machine, and starts it again on what is left of its disk."""
        former, durable = self.shard, [self.shard.durable_push(each.client_id) for each in self.trainers]
        self._num_cuts += 1
        directory = self._directory.with_name(f"{self._directory.name}-{self._num_cuts}")
        self._disk.lose(directory, random.Random(seed))
        self._disks.close()
        close(former)
        self._disk = self._new_disk(directory)
        self._held.clear()
        self.shard = self._begin()
        for each, link, push_seq in zip(self.trainers, self.links, durable, strict=True):
            self.frames[each.index].clear()
            resumption = link.expect(self.shard.incarnation)
            restored = self.shard.ledger.applied(each.client_id)
            assert resumption.push_seq <= push_seq <= restored
            self.shard.join(each.index, 2, each.client_id, Mode(SYNC), begins_job=False)
            self.shard.resume_worker(each.index, each.client_id, resumption.push_seq, resumption.step)
            self.sync()
            link.rejoin(self._registration(restored), self.now)
            self._poll(each.index)

    def finish(self) -> dict[str, Any]:
        """Lets both workers train to their end; returns the state of the shard."""
        for _ in range(10_000):
            for worker in range(2):
                self.serve(worker)
            if self._held:
                self.sync()
            if all(each.is_done for each in self.trainers) and not any(link.outstanding for link in self.links):
                break
        assert all(each.is_done for each in self.trainers)
        return state_of(self.shard)

    def _new_disk(self, directory: Path) -> PowerLoss:
        disk = PowerLoss(directory)
        self._disks.enter_context(disk.watched())
        self._disks.callback(disk.close)
        self._root = directory
        return disk

    def _begin(self) -> Shard:
        return logged_shard(self._root / "log", *TABLES, *ARRAYS, segment_bytes=1 << 15, durability=self._durability)

    def _registration(self, restored_seq: int) -> Registration:
        return Registration(
            CLUSTER, 0, 1, self.shard.incarnation, 1, "", is_supervised=True, has_log=True, restored_seq=restored_seq,
            acks_precede_durability=self._durability == "log",
        )  # fmt: skip

    def _ask(self, worker: int, outcome: Outcome | None) -> None:
        request = self.trainers[worker].next_request(outcome)
        if request is not None:
            self.links[worker].submit(request, self.now)
            self._poll(worker)

    def _receive(self, worker: int, reply: Frame) -> None:
        assert reply.error is None, reply.error
        self.now += 0.01
        outcomes = self.links[worker].receive(reply, self.now)
        self._poll(worker)
        for outcome in outcomes:
            assert outcome.error is None, outcome.error
            assert outcome.request.fill(outcome.reply) is None
            self._ask(worker, outcome)

    def _poll(self, worker: int) -> None:
        self.frames[worker] += self.links[worker].poll(self.now).requests


LOSS = 1000
"""From this number on an event is the seed of a loss of power."""
EVENTS = st.lists(
    st.one_of(
        st.sampled_from([0, 1]),
        st.lists(st.sampled_from([0, 1]), min_size=10, max_size=40),
        st.just("sync"),
        st.integers(LOSS),
    ),
    max_size=40,
)


def undisturbed(directory: Path, *, clips: bool) -> dict[str, Any]:
    with World(directory, clips=clips) as world:
        return world.finish()


@pytest.fixture(scope="module", params=[False, True], ids=["one phase", "two phases"])
def expected(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    clips: bool = request.param
    return clips, undisturbed(tmp_path_factory.mktemp("undisturbed"), clips=clips)


def test_every_rule_of_an_optimizer_is_trained() -> None:
    assert {"sgd", "adam", "ftrl", "lamb", *OF_TABLES_ALONE} < set(TRAINED)
    assert len(ARRAYS) == len(TABLES) - len(OF_TABLES_ALONE)


@pytest.mark.guarantee("W5")
@pytest.mark.guarantee("W10")
@pytest.mark.parametrize("durability", ["log", "sync"])
@settings(max_examples=20, deadline=None)
@given(events=EVENTS)
def test_power_cuts_of_sync_steps_change_no_bit(
    tmp_path_factory: pytest.TempPathFactory, expected: Any, durability: str, events: list[Any]
) -> None:
    clips, state = expected
    with World(tmp_path_factory.mktemp("cut"), clips=clips, durability=durability) as world:
        for event in events:
            if event == "sync":
                world.sync()
            elif isinstance(event, int) and event >= LOSS:
                world.lose_power(event)
            else:
                for worker in event if isinstance(event, list) else [event]:
                    world.serve(worker)
        assert world.finish() == state
