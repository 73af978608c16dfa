"""Table: what a shard asks of a table, whatever its kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.criteria import Criterion
from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.settings import Settings
from fleet_sparse.snapshot.manifest import Manifest
from fleet_sparse.snapshot.rows_reader import RowsFile
from fleet_sparse.snapshot.rows_writer import RowsWriter
from fleet_sparse.wire.control import TableState
from fleet_sparse.wire.frame_format import Block
from fleet_sparse.wire.row_dtype import FrameRows, RowDtype

from ..storage.memory_layout import MemoryLayout
from .merger import Merger
from .mutations import Assignment, Change, CopyMutation, Push, Replacement, RowAssignment
from .reply_memory import ReplyMemory
from .row_asks import CacheTerms, RowAnswer
from .row_limit import NO_LIMITS, RowLimits
from .shrunk import TableRemoval


class TableContext(NamedTuple):
    """The objects that all tables of one shard share."""

    placement: Placement
    shard: int
    """Index of the shard."""
    merger: Merger
    reply_memory: ReplyMemory
    """Memory for the rows that tables return."""
    layout: MemoryLayout
    """Changes when `EmbeddingTable.describe` would write something else of a table."""
    max_pre_image_bytes: int = Settings.max_pre_image_bytes
    huge_pages: bool = True
    row_limits: RowLimits = NO_LIMITS


Post = Callable[[Callable[[], Any]], "Future[Any]"]
"""Runs a task of a millisecond or two in the thread that owns the shard."""

Part = tuple[RowsFile, Any]
"""A file of a snapshot and the section of one table in it: a `TableSection` or a `DenseSection`, as the spec says."""


class OnChanged(Protocol):
    """Gets the ids that changed since the last cut that was kept, in parts."""

    def __call__(self, spec: TableSpec, ids: NDArray[np.int64], *, is_removed: bool) -> None:
        """Gets some of them.

        Args:
            spec: Spec of the table, or of its counters.
            ids: Distinct ids.
            is_removed: True if they were removed; they may have rows again.
        """


class TableCut(Protocol):
    """The content of a table at the cut of a save. `export` and `back_memory` run in any thread but the owner's."""

    def back_memory(self) -> None:
        """Asks the system to back memory that pushes during the save touch."""

    def export(self, writer: RowsWriter, post: Post, on_changed: OnChanged | None = None) -> None:
        """Writes the content to a rows file, once.

        Args:
            writer: Between two tables.
            post: Runs whatever reads the table itself.
            on_changed: Called with what the next delta would contain of an incremental table.

        Raises:
            SnapshotError: Pushes needed too much memory for pre-images, or the system or `post` refused.
        """

    def release(self) -> None:
        """Frees memory because nothing will be exported. The thread that owns the shard calls it."""

    def end(self, *, kept: bool) -> None:
        """Ends the cut and frees its memory, in the thread that owns the shard. A second call does nothing.

        Args:
            kept: True if what changed up to the cut is saved; otherwise it is in the next delta, too.
        """


class Table(Protocol):
    """One shard's part of a table. A kind of table is a module in this room and a line in `kinds.py`.

    Checks raise `Refusal` and change nothing. Only `apply`, `apply_change`, `assign_rows`, `assign`, `replace`,
    `shrink`, `end_day`, `adopt` and `load` change a table. Only a shard's `commit` calls the first seven; `load` fills
    a staging shard.

    Attributes:
        is_selectable: True if a save or load may name the table to have it without the others.
        is_incremental: True if a delta contains only what changed since its base; otherwise it contains everything.
        where: `table 'C1'`, for messages.
        optimizer_step: Largest step that a push carried.
    """

    is_selectable: bool
    is_incremental: bool
    where: str
    optimizer_step: int

    @property
    def spec(self) -> TableSpec | DenseSpec:
        """The spec that the table was declared with."""

    @property
    def state(self) -> TableState:
        """The state that registration and heartbeats report of the table."""

    @property
    def num_bytes(self) -> int:
        """Memory of values and optimizer state."""

    @property
    def is_partly_assigned(self) -> bool:
        """True if some of the first values of a dense array have arrived, and not all."""

    @property
    def num_parameters(self) -> int:
        """Number of parameters in it, each with a norm of its own: 1, or the segments of a dense array."""

    def check(self, block: Block) -> None:
        """Checks the shape of a block."""

    def check_pull(self, block: Block) -> None:
        """Checks a pull whose rows are read later; `pull` makes the same checks."""

    def widened(self, rows: FrameRows, dtype: RowDtype) -> NDArray[np.float32]:
        """Returns 16-bit rows of a block as float32, in memory that does not change while it is referred to."""

    def check_push(self, block: Block, grads: NDArray[np.float32], *, is_staged: bool) -> Push:
        """Returns the push of a block, checked; repeated ids are merged.

        Args:
            block: A PUSH block that passed `check`.
            grads: Its rows as float32.
            is_staged: The push waits for its sync step: its scale is a weight, to be used when the step is merged.
        """

    def check_change(self, block: Block, rows: NDArray[np.float32]) -> Change:
        """Returns the changes of a CHANGE block, checked; `rows` are its rows as float32."""

    def check_assignment(self, block: Block, values: NDArray[np.float32]) -> Assignment | RowAssignment:
        """Returns the assignment of an ASSIGN block, checked."""

    def check_replacement(self, block: Block, values: NDArray[np.float32]) -> Replacement:
        """Returns the replacement of a REPLACE or REPLACE_STATE block, checked."""

    def pull(self, block: Block, out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """Returns the rows `(count, dim)` that a block asks for, in `out` if it is given, which is contiguous.

        Another array does not change while it is referred to.
        """

    def ask(self, block: Block, terms: CacheTerms) -> RowAnswer:
        """Answers a block that asks about copies of rows.

        Args:
            block: A PULL block with versions that passed `check`.
            terms: Of the job.
        """

    def forget_copies(self) -> None:
        """No worker has copies of rows any more."""

    def apply(self, push: Push) -> int:
        """Applies a push with the table's rule; returns the number of rows updated.

        Raises:
            MemoryError: There is no room for more rows. No row has another value than before.
        """

    def apply_change(self, change: Change) -> int:
        """Merges changes of copies; returns the number of rows changed.

        Raises:
            MemoryError: As `apply`.
        """

    def assign_rows(self, assignment: RowAssignment) -> int:
        """Sets rows and states; returns the number of rows changed.

        Raises:
            MemoryError: As `apply`.
        """

    def assign(self, assignment: Assignment) -> None:
        """Sets the first values; does nothing if there are values."""

    def replace(self, replacement: Replacement) -> None:
        """Replaces the values, or a state of their rule."""

    def judge(self, criteria: Sequence[Criterion], decay: float) -> NDArray[np.int16]:
        """Returns the number of the first of the checked criteria that selects each row, -1 for none: `(num_rows,)`.

        Shows and clicks are judged as if they were multiplied by `decay`.

        Raises:
            ValueError: As `TableStore.judge`.
        """

    def removals(self, criteria: Sequence[Criterion], judged: NDArray[np.int16]) -> list[TableRemoval]:
        """Returns what each criterion removes according to `judge`; for a table without rows, nothing."""

    def check_shrink(self) -> None:
        """Checks that `shrink` may be called.

        Raises:
            ValueError: A copy-on-write view is open.
        """

    def shrink(self, judged: NDArray[np.int16], decay: float) -> int:
        """Multiplies shows and clicks by `decay` and removes the rows that `judge` selected; returns their number.

        Raises:
            ValueError: As `TableStore.shrink`. Nothing changed.
        """

    def end_day(self) -> None:
        """Ends a day of the table.

        Raises:
            ValueError: As `TableStore.end_day`. Nothing changed.
        """

    def merge(self, contributions: Sequence[Sequence[Push]], scale: str) -> Push:
        """Merges the pushes of several workers into one; gradients are added in float32, in worker order.

        Args:
            contributions: As in `Average.of`.
            scale: "avg" or "sum".

        Raises:
            Refusal: A merged gradient is not finite.
        """

    def squared_norms(self, push: Push) -> NDArray[np.float64]:
        """Returns the sum of squares of each parameter's gradient, `(num_parameters,)`."""

    def clip(self, push: Push, factors: NDArray[np.float32]) -> Push:
        """Returns the push with the gradient of each parameter times its factor."""

    def changes(self, push: Push | CopyMutation, block: Block) -> NDArray[np.bool_]:
        """Returns which rows of a pulled block a push changes, `(count,)`."""

    def capture(self, *, only_changed: bool, ends_day: bool, left_out: Sequence[Criterion] = ()) -> TableCut:
        """Fixes the content that a save writes, and returns it. The table may change afterwards.

        Args:
            only_changed: The save is a delta. A table that is not incremental is captured completely.
            ends_day: The saved table is a day older than this one.
            left_out: Checked criteria: a row is left out if one of them selects it.

        Raises:
            SnapshotError: The saved table would be too old. Nothing was begun.
            MemoryError: The system refuses the memory. Nothing was begun.
        """

    def restore_changes(self, ids: NDArray[np.int64], *, is_removed: bool, is_counter: bool) -> None:
        """Makes ids part of the next delta, as `OnChanged` got them."""

    def source_shards(self, manifest: Manifest) -> Iterable[int]:
        """Returns the shards of a snapshot whose files can contain something of this table."""

    def load(self, parts: Sequence[Part], *, is_delta: bool, check_active: Callable[[], None]) -> None:
        """Loads what one snapshot contains of the table. Of a chain the full snapshot is loaded first.

        Args:
            parts: The sections of the table in the files of all `source_shards`, and perhaps of others.
            is_delta: The snapshot is a delta.
            check_active: Raises SnapshotError if the load was given up; called every few milliseconds.

        Raises:
            SnapshotCorrupt: Bytes are wrong. The table contains a part of the snapshot and cannot be used.
            SnapshotError: A file cannot be read, or the load was given up. The table cannot be used either.
        """

    def adopt(self, spec: TableSpec) -> None:
        """Continues with a spec that differs in its entry alone. Rows stay; so do counters that both policies read.

        Raises:
            ValueError: As `TableStore.adopt`. Nothing changed.
        """

    def close(self) -> None:
        """Frees the memory. Nothing may be called afterwards."""
