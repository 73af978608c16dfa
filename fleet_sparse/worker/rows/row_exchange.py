"""RowAsk and RowChange: what a worker that caches rows sends about its copies, and the answers that it gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.kernels_copies import place_answers
from fleet_sparse.core.row_bound import NO_VERSION, ROW_FOLLOWS, STATES_FOLLOW
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.wire.frame_format import Block

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
    """Weight of the changes of states (`kernels_changes`)."""
    optimizer_step: int
    """The rule's t of the newest update."""
    is_whole: bool
    """True if the rows replace those of the pservers."""


def answer_of(ask: RowAsk, blocks: Sequence[Block]) -> Answer:
    """Returns the answer to an ask.

    Args:
        ask: The ask.
        blocks: Those of the table in the answers of all shards, in the order of the shards and of the parts of their
            answers: for each part slack, then rows, then rows with states, where there are some.

    Raises:
        ValueError: The blocks do not answer the ask.
    """
    spec, num_ids = ask.spec, len(ask.unique.ids)
    num_rows = sum(block.count for block in blocks if "slack" not in block.copies)
    slack, versions = np.empty(num_ids, np.uint8), np.empty(num_rows, np.uint32)
    rows, state_shape = np.empty((num_rows, spec.dim), np.float32), (spec.update_rule.num_states, spec.dim)
    states: list[NDArray[np.float32]] = []
    begin = end = first = next_first = 0  # of the answers of a part, and of its rows
    is_complete = True
    for block in blocks:
        if "slack" in block.copies:
            begin, end, first = end, end + block.count, next_first
            slack[begin:end] = block.copies["slack"]
            continue
        code = STATES_FOLLOW if "states" in block.copies else ROW_FOLLOWS
        assert block.rows is not None, "an answer with versions has rows"
        of_block: NDArray[Any] = block.rows.reshape(-1)
        out = rows[first:].reshape(-1), versions[first:]
        num_placed = place_answers(slack[begin:end], code, of_block, block.copies["versions"], spec.dim, *out)
        is_complete &= num_placed == block.count
        next_first += block.count
        if code == STATES_FOLLOW:
            states.append(block.copies["states"])
    if not is_complete or end != num_ids or num_rows != np.count_nonzero(slack >= ROW_FOLLOWS):
        raise ValueError(f"table {spec.name!r}: the answer has {end} ids and {num_rows} rows of {num_ids} asked")
    follows = STATES_FOLLOW if spec.update_rule.num_states else ROW_FOLLOWS
    if (slack[ask.versions == NO_VERSION] != follows).any():
        raise ValueError(f"table {spec.name!r}: the answer lacks rows or states of ids without a version")
    if any(of_block.shape[1:] != state_shape for of_block in states):
        raise ValueError(f"table {spec.name!r}: states of the answer are not {state_shape}")
    all_states = states[0] if len(states) == 1 else np.concatenate([np.empty((0, *state_shape), np.float32), *states])
    return Answer(slack, rows, versions, all_states)
