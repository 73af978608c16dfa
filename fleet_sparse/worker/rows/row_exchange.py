"""RowAsk and RowChange: what a worker that caches rows sends about its copies, and the answers that it gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.kernels_copies import place_answers
from fleet_sparse.core.row_bound import NO_VERSION, ROW_FOLLOWS, STATES_FOLLOW
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import ErrorCode, ProtocolError
from fleet_sparse.wire.frame_format import Block
from fleet_sparse.wire.row_dtype import RowDtype

from .cache_step import Answer
from .deduplicator import UniqueIds

ID_BYTES, FLOAT_BYTES, VERSION_BYTES, COUNT_BYTES, SLACK_BYTES = 8, 4, 4, 4, 1


class RowAsk(NamedTuple):
    """Asks the pservers about copies of rows of one table."""

    spec: TableSpec
    unique: UniqueIds
    versions: NDArray[np.uint32]
    """`(k,)`: clock of the value that each copy was made from; `NO_VERSION` for ids that enter the cache."""


class RowChange(NamedTuple):
    """Changes of rows that the pservers merge, or in a job of one worker the rows themselves."""

    spec: TableSpec
    unique: UniqueIds
    rows: NDArray[np.float32]
    """`(k, dim)`: changes, or rows."""
    counts: NDArray[np.uint32]
    """`(k,)`: by how much the clocks advance; not sent with rows."""
    states: NDArray[np.float32] | None
    """`(k, num_states, dim)`: changes of states, or states; None if the change has none."""
    num_updates: NDArray[np.uint32]
    """`(k,)`: number of updates that the changes of states span."""
    weight: float
    """Weight of the changes of states (`kernels_changes`); not sent with rows."""
    optimizer_step: int
    """The rule's t of the newest update."""
    is_whole: bool
    """True if the rows replace those of the pservers."""


def answer_of(ask: RowAsk, blocks: Sequence[tuple[int, Block]]) -> Answer:
    """Returns the answer to an ask.

    Args:
        ask: The ask.
        blocks: Those of the table in the answers of all shards, each with its shard, in the order of the shards and of
            the parts of their answers: for each part slack, then rows, then rows with states, where there are some.

    Raises:
        ProtocolError: The blocks do not answer the ask.
    """
    spec, num_ids, parts = ask.spec, len(ask.unique.ids), _parts_of(ask, blocks)
    num_rows = sum(block.count for part in parts for block in part.rows.values())
    slack, versions = np.empty(num_ids, np.uint8), np.empty(num_rows, np.uint32)
    rows, state_shape = np.empty((num_rows, spec.dim), np.float32), (spec.update_rule.num_states, spec.dim)
    states: list[NDArray[np.float32]] = []
    end = next_first = 0  # of the answers of a part, and of its rows
    for part in parts:
        begin, end, first = end, end + len(part.slack), next_first
        slack[begin:end] = part.slack
        for code, block in part.rows.items():
            assert block.rows is not None, "as _check_rows says"
            of_block: NDArray[Any] = block.rows.reshape(-1)
            out = rows[first:].reshape(-1), versions[first:]
            place_answers(part.slack, code, of_block, block.copies["versions"], spec.dim, *out)
            next_first += block.count
            if code == STATES_FOLLOW:
                states.append(block.copies["states"])
    _check_entering(ask, slack)
    all_states = states[0] if len(states) == 1 else np.concatenate([np.empty((0, *state_shape), np.float32), *states])
    return Answer(slack, rows, versions, all_states)


class _Part(NamedTuple):
    """The blocks of a table in one answer of a shard."""

    shard: int
    slack: NDArray[np.uint8]
    rows: dict[int, Block]
    """By code, `ROW_FOLLOWS` or `STATES_FOLLOW`: as many as slack has of it."""


def _parts_of(ask: RowAsk, blocks: Sequence[tuple[int, Block]]) -> list[_Part]:
    """Returns the parts of an answer, whose blocks fit the table and each other. Raises as `answer_of`."""
    spec, parts = ask.spec, list[_Part]()
    num_answered = np.zeros_like(ask.unique.num_per_shard)
    for shard, block in blocks:
        if "slack" in block.copies:
            parts.append(_Part(shard, block.copies["slack"], {}))
            num_answered[shard] += block.count
            continue
        _check_rows(spec, shard, block)
        code = STATES_FOLLOW if "states" in block.copies else ROW_FOLLOWS
        if not parts or parts[-1].shard != shard or code in parts[-1].rows:
            what = "rows with states" if code == STATES_FOLLOW else "rows"
            raise _refusal(spec, shard, f"has a block of {what} more than it should, at most one follows slack")
        parts[-1].rows[code] = block
    for shard in np.flatnonzero(num_answered != ask.unique.num_per_shard).tolist():
        num_asked = ask.unique.num_per_shard[shard]
        raise _refusal(spec, shard, f"is about {num_answered[shard]} ids, should be about {num_asked}")
    for part in parts:
        for code in (ROW_FOLLOWS, STATES_FOLLOW):
            num_rows = part.rows[code].count if code in part.rows else 0
            num_said = np.count_nonzero(part.slack == code)
            if num_rows != num_said:
                raise _refusal(
                    spec, part.shard, f"has {num_rows} rows of ids with slack {code}, should have {num_said}"
                )
    return parts


def _check_rows(spec: TableSpec, shard: int, block: Block) -> None:
    """Raises `ProtocolError` if a block of an answer does not have rows of the table."""
    if block.rows is None or "versions" not in block.copies:
        raise _refusal(spec, shard, f"has a block with {', '.join(block.copies)}, should have rows and versions")
    if (block.dim, block.dtype) != (spec.dim, RowDtype.FLOAT32):
        is_, should = f"dim {block.dim} and dtype {block.dtype.name}", f"dim {spec.dim} and dtype FLOAT32"
        raise _refusal(spec, shard, f"has rows of {is_}, should have {should}")
    num_states = spec.update_rule.num_states
    if "states" in block.copies and block.copies["states"].shape[1] != num_states:
        of_row = block.copies["states"].shape[1]
        raise _refusal(spec, shard, f"has {of_row} states of a row, should have {num_states}")


def _check_entering(ask: RowAsk, slack: NDArray[np.uint8]) -> None:
    """Raises `ProtocolError` if an id without a version has no row, or none with the states of the rule."""
    follows = STATES_FOLLOW if ask.spec.update_rule.num_states else ROW_FOLLOWS
    for place in np.flatnonzero((ask.versions == NO_VERSION) & (slack != follows))[:1]:
        shard = int(np.searchsorted(np.cumsum(ask.unique.num_per_shard), place, side="right"))
        what = f"has slack {slack[place]} for id {ask.unique.ids[place]} without a version, should have {follows}"
        raise _refusal(ask.spec, shard, what)


def _refusal(spec: TableSpec, shard: int, what: str) -> ProtocolError:
    return ProtocolError(
        f"shard {shard}: table {spec.name!r}: the answer about copies {what}", code=ErrorCode.MALFORMED
    )
