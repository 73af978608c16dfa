"""Values that a cached table and its caller exchange in a step: a plan, its answer, and a part of a push."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.cache_index import Entries

NOWHERE = np.empty(0, np.int64)

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]
Counts = NDArray[np.uint32]


class Plan(NamedTuple):
    """How the rows of a batch are read. All places are ascending indices of its ids."""

    ids: Ids
    """`(k,)`, distinct."""
    slots: NDArray[np.int64]
    """`(k,)`, -1 for ids without a copy."""
    plain: NDArray[np.int64]
    """Places that are pulled as without a cache."""
    asked: NDArray[np.int64]
    """Places that the pservers are asked about with the rows of the batch."""
    versions: Counts
    """Versions of the copies at `asked`; `NO_VERSION` if row and states should follow."""
    entering: NDArray[np.int64]
    """Places of the ids that enter, among `asked`; in another order if the batch was looked up in parts."""
    entries: Entries
    """The slots that these take."""
    step: int
    """Step of the batch."""
    index_version: int
    """Number of changes of the index before."""
    ordinal: int
    """Number of plans before."""
    late: NDArray[np.int64] = NOWHERE
    """Places of copies that the pservers are asked about when the batch is used, of a plan that is made ahead."""


class Answer(NamedTuple):
    """The answer of the pservers about the asked ids of a plan."""

    slack: NDArray[np.uint8]
    """`(len(asked),)`: steps, `ROW_FOLLOWS` or `STATES_FOLLOW`."""
    rows: Floats
    """`(m, dim)`: rows of all ids whose row follows, in the order of the ids."""
    versions: Counts
    """`(m,)`: their clocks."""
    states: Floats
    """`(l, num_states, dim)`: states of the ids with `STATES_FOLLOW`, in their order."""


class Arrived(NamedTuple):
    """Rows that enter the cache when the gradients of their batch are applied, with their states and clocks."""

    rows: Floats
    states: Floats
    versions: Counts


class Changes(NamedTuple):
    """Changes of rows that the pservers merge; in a job of one worker the rows themselves, which they take over."""

    ids: Ids
    """`(n,)`, in no order."""
    rows: Floats
    """`(n, dim)`."""
    amounts: Counts
    """`(n,)`: by how much the clocks advance; 0 only where the rows do not change, but their states do."""
    states: Floats
    """`(n, num_states, dim)`, or `(n, 0, dim)` if states stay as they are."""
    num_updates: Counts
    """`(n,)`: number of updates that the changes of states span."""
    slots: NDArray[np.int64]
    """`(n,)`: their copies; -1 for rows that left."""


class Outgoing(NamedTuple):
    """The part of a push that belongs to one table."""

    as_gradients: NDArray[np.int64]
    """Places of the batch whose gradients go as they are, ascending."""
    changes: tuple[Changes, ...]
    """Those of rows that left, of rows without their states, and of rows with them; none is empty. If an id left, the
    push was not accepted and the id entered again, two of them have it, in their order."""
    single_updates: NDArray[np.int64]
    """Slots of the copies among `as_gradients`."""


NOTHING_SENT = Outgoing(NOWHERE, (), NOWHERE)
