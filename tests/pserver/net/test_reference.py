"""Requests of any kind and order, answered by a shard and by a plain model of it: the same bytes, and the same rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_sparse.core.initializer import constant
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import ErrorCode
from fleet_sparse.wire.decode import decode
from fleet_sparse.wire.encode import encode
from fleet_sparse.wire.frame_format import PULLS, Action, Block, Frame, FrameError, Header, Op
from fleet_sparse.wire.row_dtype import RowDtype, for_frame
from support.shards import CLUSTER, INCARNATION, SGD, make_shard
from support.straight import ReadableAnswers, StraightAnswers

MAX_BYTES = 1 << 20
WIDE = TableSpec(name="wide", dim=5, rule="sgd", initializer=constant(-2.0))
UNKNOWN = TableSpec(name="unknown", dim=2, rule="sgd", initializer=constant(0.5))
FIRST = {SGD.table_id: 0.5, WIDE.table_id: -2.0}


class Refused(Exception):
    """The model refuses a request."""

    def __init__(self, code: ErrorCode, number: int = 0) -> None:
        super().__init__(code, number)
        self.code, self.number = code, number


@dataclass
class Model:
    """A shard as a dict of rows, all of whose floats are equal; SGD with exact learning rates and gradients."""

    rows: dict[tuple[int, int], float] = field(default_factory=dict)  # by table and id
    applied: dict[bytes, int] = field(default_factory=dict)  # newest push by client

    def answer(self, frame: Frame) -> list[Block]:
        """Returns the blocks of the reply."""
        header, applied = frame.header, self.applied.get(frame.header.client_id, 0)
        self.check_header(header)
        if header.push_floor > applied or header.push_seq > applied + 1:
            raise Refused(ErrorCode.GAP, applied + 1)
        pulls = [block for block in frame.blocks if block.action is Action.PULL]
        for block in pulls:
            self.check_table(block)
        if header.push_seq > applied:
            self.push([block for block in frame.blocks if block.action is Action.PUSH])
            self.applied[header.client_id] = header.push_seq
        return [self.pulled(block) for block in pulls]

    def check_header(self, header: Header) -> None:
        for name, code in (
            ("cluster_id", ErrorCode.WRONG_SHARD),
            ("shard", ErrorCode.WRONG_SHARD),
            ("incarnation", ErrorCode.WRONG_INCARNATION),
            ("placement_version", ErrorCode.WRONG_SHARD),
        ):
            if getattr(header, name) != ADDRESS[name]:
                raise Refused(code)

    def check_table(self, block: Block) -> None:
        if block.table_id not in FIRST:
            raise Refused(ErrorCode.UNKNOWN_TABLE)
        if block.schema_hash not in (SGD.schema_hash, WIDE.schema_hash):
            raise Refused(ErrorCode.SCHEMA)

    def push(self, blocks: list[Block]) -> None:
        after = dict(self.rows)
        seen: set[int] = set()
        for block in blocks:
            if block.table_id in seen:
                raise Refused(ErrorCode.MALFORMED)
            seen.add(block.table_id)
            self.check_table(block)
            if block.optimizer_step == 0:
                raise Refused(ErrorCode.MALFORMED)
            assert block.ids is not None
            assert block.rows is not None
            if not np.isfinite([block.learning_rate, *block.rows.reshape(-1)]).all():
                raise Refused(ErrorCode.NOT_FINITE)
            for id_, grad in zip(block.ids.tolist(), block.rows[:, 0].tolist(), strict=True):
                key = block.table_id, id_
                after[key] = self.row(*key, after) - block.learning_rate * block.gradient_scale * grad
        self.rows = after

    def pulled(self, block: Block) -> Block:
        assert block.ids is not None
        values = [[self.row(block.table_id, id_, self.rows)] * block.dim for id_ in block.ids.tolist()]
        rows = for_frame(np.array(values, np.float32).reshape(-1, block.dim), block.dtype)
        return Block(
            Action.ROWS, block.table_id, block.schema_hash, block.dim, block.count, rows=rows, dtype=block.dtype
        )

    @staticmethod
    def row(table_id: int, id_: int, rows: dict[tuple[int, int], float]) -> float:
        return rows.get((table_id, id_), FIRST[table_id])


ADDRESS: dict[str, int] = {"cluster_id": CLUSTER, "shard": 0, "incarnation": INCARNATION, "placement_version": 1}
IDS = st.lists(st.integers(-3, 4) | st.sampled_from([-(2**63), 2**63 - 1]), max_size=6)
TABLES = st.sampled_from([SGD, SGD, WIDE, WIDE, WIDE, UNKNOWN])
RARELY = st.integers(0, 19).map(lambda drawn: drawn == 0)


@st.composite
def pulls(draw: st.DrawFn) -> Block:
    spec, ids = draw(TABLES), np.array(draw(IDS), np.int64)
    dtype = draw(st.sampled_from([RowDtype.FLOAT32, RowDtype.FLOAT32, RowDtype.BFLOAT16]))
    return Block(Action.PULL, spec.table_id, spec.schema_hash, spec.dim, len(ids), ids, dtype=dtype)


@st.composite
def pushes(draw: st.DrawFn) -> Block:
    spec, ids = draw(TABLES), np.array(draw(IDS), np.int64)
    grads = np.repeat(np.array([draw(st.integers(-8, 8)) for _ in ids], np.float32), spec.dim).reshape(-1, spec.dim)
    if grads.size and draw(RARELY):
        grads[-1, -1] = draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    rate = draw(st.sampled_from([1.0, 0.5, 0.25])) if not draw(RARELY) else np.nan
    schema_hash = spec.schema_hash ^ draw(RARELY)
    step, scale = 0 if draw(RARELY) else 1, draw(st.sampled_from([1.0, 1.0, 0.5]))
    return Block(Action.PUSH, spec.table_id, schema_hash, spec.dim, len(ids), ids, grads, rate, step, scale)


@st.composite
def requests(draw: st.DrawFn) -> tuple[Op, list[Block], int, dict[str, Any]]:
    """Op, blocks, how far its number is from the next push of its client, and header fields."""
    op = draw(st.sampled_from([Op.PULL, Op.PUSH, Op.PUSH, Op.PUSH_PULL]))
    kinds = {Op.PULL: pulls(), Op.PUSH: pushes(), Op.PUSH_PULL: pulls() | pushes()}
    fields: dict[str, Any] = {
        "client_id": draw(st.sampled_from([b"a" * 16, b"b" * 16])),
        "flags": draw(st.integers(0, 1)),
        "request_id": draw(st.integers(0, 2**64 - 1)),
        "client_epoch": draw(st.integers(0, 3)),
        "num_parts": 2,
        "part": draw(st.integers(0, 1)),
    }
    if draw(RARELY):
        name = draw(st.sampled_from(list(ADDRESS)))
        fields[name] = ADDRESS[name] + 1
    return op, draw(st.lists(kinds[op], max_size=3)), draw(st.sampled_from([0, 0, 0, 0, -1, -2, 1])), fields


@settings(max_examples=300, deadline=None)
@given(st.lists(requests(), max_size=25), st.booleans())
@pytest.mark.guarantee("E4")
@pytest.mark.guarantee("E5")
def test_replies_and_rows_are_those_of_a_plain_model(
    sent: list[tuple[Op, list[Block], int, dict[str, Any]]], is_straight: bool
) -> None:
    shard, model = make_shard(SGD, WIDE), Model()
    path = StraightAnswers(shard, MAX_BYTES) if is_straight else ReadableAnswers(shard, MAX_BYTES)
    try:
        for op, blocks, ahead, fields in sent:
            number = max(model.applied.get(fields["client_id"], 0) + 1 + ahead, 1)
            seq = {"push_floor": number - 1} if op in PULLS else {"push_seq": number}
            request = Header(op, **{**ADDRESS, **seq, **fields})
            reply = path.answer(encode(Frame(request, blocks)))
            received = decode(reply, max_bytes=MAX_BYTES)
            try:
                expected, error = model.answer(Frame(request, blocks)), None
            except Refused as refused:  # the message is the shard's
                message = "" if received.error is None else received.error.message
                expected, error = [], FrameError(refused.code, refused.number, message)
            reply_op = Op.ERROR if error else Op.ACK if op is Op.PUSH else Op.ROWS
            applied = model.applied.get(fields["client_id"], 0)
            header = Header(reply_op, **{**fields, **ADDRESS}, push_seq=applied)
            assert reply == [bytes(part) for part in encode(Frame(header, expected, error))]
        for spec in (SGD, WIDE):
            ids = np.array([id_ for table_id, id_ in model.rows if table_id == spec.table_id], np.int64)
            block = Block(Action.PULL, spec.table_id, spec.schema_hash, spec.dim, len(ids), ids)
            (rows,) = shard.execute(Header(Op.PULL), [block]).blocks
            assert np.array_equal(rows.rows, model.pulled(block).rows)
        assert [state.num_rows for state in shard.states()] == [
            sum(table_id == spec.table_id for table_id, _ in model.rows) for spec in (SGD, WIDE)
        ]
    finally:
        shard.close()
