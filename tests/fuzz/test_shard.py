"""Fuzzed requests of two workers to a shard, in every mode: each is answered, and none makes the shard fail."""

from __future__ import annotations

import random
from contextlib import ExitStack, closing

import numpy as np
import pytest

from fleet_sparse.core.mode import ASYNC, SUM, SYNC, Mode
from fleet_sparse.errors import ErrorCode
from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.pserver.net.requests import deferred_answers
from fleet_sparse.wire.decode import decode
from fleet_sparse.wire.encode import encode
from fleet_sparse.wire.frame_format import HEADER_BYTES, PULLS, Action, Block, Frame, Op
from support.frames import MAX_BYTES, resized
from support.fuzzing import Cases, edge, flat_memory, mutated
from support.shards import ADAM, DENSE, SGD, FrameClient, assign, floats, ids_of, make_shard, pull, push, replace_state
from support.straight import StraightAnswers

LIFE = 50
"""Requests to one shard: a step that was refused ends the job of a shard in sync mode."""
MODES = (Mode(ASYNC), Mode(SYNC), Mode(SYNC, SUM))
OPS = (Op.PULL, Op.PULL, Op.PUSH, Op.PUSH, Op.PUSH_PULL, Op.PULL_EARLY, Op.PREPARE, Op.COMMIT, Op.LEAVE, Op.ASSIGN)


def some_rows(rng: random.Random, count: int, dim: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.frombuffer(rng.randbytes(count * dim), np.int8).astype(np.float32).reshape(count, dim)


def blocks_of(rng: random.Random, op: Op, step: int) -> list[Block]:
    """Blocks that suit an op."""
    ids = ids_of(*sorted(rng.sample(range(-20, 20), rng.randrange(6))))
    specs = rng.sample((SGD, ADAM), rng.randrange(3))
    pulls = [pull(spec, ids) for spec in specs]
    if rng.random() < 0.3:
        pulls.append(pull(DENSE, count=DENSE.num_values))
    if op in PULLS:
        return pulls
    if op is Op.ASSIGN:
        values = floats(*range(DENSE.num_values))
        return [assign(DENSE, values) if rng.random() < 0.8 else replace_state(DENSE, values, edge(rng, 3))]
    if op is Op.COMMIT:
        names = rng.sample((SGD, ADAM, DENSE), rng.randrange(4))
        count = {SGD: 1, ADAM: 1, DENSE: 2}
        return [
            Block(
                Action.FACTORS,
                spec.table_id,
                spec.schema_hash,
                1,
                count[spec],
                rows=np.full((count[spec], 1), 0.5, "f4"),
            )
            for spec in names
        ]
    if op is Op.LEAVE:
        return []
    numbers = {
        "optimizer_step": step,
        "gradient_scale": rng.choice((*[1.0] * 20, 0.5, 0.0, float("inf"), float("nan"))),
    }
    pushes = [push(spec, ids, some_rows(rng, len(ids), spec.dim), learning_rate=0.5, **numbers) for spec in specs]
    if rng.random() < 0.3:
        pushes.append(push(DENSE, None, floats(*range(DENSE.num_values)), **numbers))
    return [*pushes, *(pulls if op is Op.PUSH_PULL else ())]


def fuzzed_parts(rng: random.Random, shard: Shard, clients: list[FrameClient[Shard]]) -> list[bytes]:
    """The parts of a request, of which most are valid by themselves."""
    client = rng.choice(clients)
    op = rng.choice(OPS)
    step = shard.complete_step + 1 if rng.random() < 0.9 else edge(rng, 64)
    if rng.random() < 0.1 or op is Op.LEAVE or op is Op.ASSIGN:
        step = 0
    client.seq = max(client.seq, shard.ledger.newest(client.client_id))
    floor = client.seq if op in PULLS and rng.random() < 0.8 else 0
    sequence = 0 if op in PULLS else client.seq + 1
    frame: Frame = client.frame(
        op, *blocks_of(rng, op, max(step, 1)), step=step, push_floor=floor, push_seq=sequence, request_id=edge(rng, 64)
    )
    parts = [bytes(part) for part in encode(frame)]
    if rng.random() < 0.9:
        return parts
    changed = mutated(rng, parts)
    return resized(changed) if changed and len(changed[0]) >= HEADER_BYTES else parts


@pytest.mark.cases(1_500, 100_000)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.to_json())
def test_no_request_makes_a_shard_fail(cases: Cases, mode: Mode) -> None:
    rng, num_replies, num_refused, num_deferred = cases.rng, 0, 0, 0
    with ExitStack() as stack:
        for begin in range(0, cases.num_cases, LIFE):
            if begin == 20 * LIFE:  # the first ones load kernels
                stack.enter_context(flat_memory())
            with closing(make_shard(SGD, ADAM, DENSE)) as shard:
                answers = StraightAnswers(shard, MAX_BYTES)
                clients = [FrameClient(shard, bytes([number]) * 16) for number in (1, 2)]
                for number, client in enumerate(clients):
                    shard.join(number, len(clients), client.client_id, mode, begins_job=number == 0)
                first = FrameClient(shard, clients[0].client_id)
                assert first.ask(Op.ASSIGN, assign(DENSE, floats(*range(DENSE.num_values)))).error is None
                for _ in range(min(LIFE, cases.num_cases - begin)):
                    parts = fuzzed_parts(rng, shard, clients)
                    replies = [answers.answer(parts)]
                    late = [[bytes(part) for part in each.parts] for each in deferred_answers(shard)]
                    num_deferred += len(late)
                    for reply in (*replies, *late):
                        frame = decode(reply, max_bytes=MAX_BYTES)
                        assert frame.error is None or frame.error.code is not ErrorCode.INTERNAL, frame.error
                        num_refused += frame.error is not None
                        num_replies += 1
                assert shard.fault == ""
    assert num_replies - num_refused > cases.num_cases / 20
    cases.report(replies=num_replies, refused=num_refused, deferred=num_deferred)
