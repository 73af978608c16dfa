"""RowAsk and RowChange: what a worker that caches rows sends about its copies, and the answers that it gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.row_bound import ROW_FOLLOWS, STATES_FOLLOW
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.wire.frame_format import Block

from .cached_table import Answer
from .deduplicator import UniqueIds


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
    """Weight of the change."""
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
    num_states = spec.update_rule.num_states
    slack, versions = np.empty(num_ids, np.uint8), np.zeros(num_ids, np.uint32)
    rows = np.empty((num_ids, spec.dim), np.float32)
    states, begin, end = [np.empty((0, num_states, spec.dim), np.float32)], 0, 0
    for block in blocks:
        if "slack" in block.copies:
            begin, end = end, end + block.count
            slack[begin:end] = block.copies["slack"]
            continue
        code = STATES_FOLLOW if "states" in block.copies else ROW_FOLLOWS
        places = begin + np.flatnonzero(slack[begin:end] == code)
        assert block.rows is not None, "an answer with versions has rows"
        rows[places], versions[places] = block.rows, block.copies["versions"]
        if code == STATES_FOLLOW:
            states.append(block.copies["states"])
    has_row = slack >= ROW_FOLLOWS
    of_states = np.concatenate(states)
    if end != num_ids or len(of_states) != int(np.count_nonzero(slack == STATES_FOLLOW)):
        raise ValueError(
            f"table {spec.name!r}: the answer has {end} ids and {len(of_states)} states of {num_ids} asked"
        )
    return Answer(slack, rows[has_row], versions[has_row], of_states)
