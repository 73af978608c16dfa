"""DenseTable: one shard's range of a dense array as a table, and DenseRange, its values with their update rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse import machine_memory
from fleet_sparse.core import clip
from fleet_sparse.core.bounds import Bounds
from fleet_sparse.core.clip import DensePart
from fleet_sparse.core.criteria import Criterion
from fleet_sparse.core.decay import Decay
from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.kernels_decay import add_decay
from fleet_sparse.core.kernels_dense import add_one_more, add_two
from fleet_sparse.core.mode import SUM
from fleet_sparse.core.placement import EVEN
from fleet_sparse.core.reused_memory import UNUSED, ReusedMemory, find_by_references
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import ErrorCode, PlanError
from fleet_sparse.snapshot.manifest import Manifest
from fleet_sparse.snapshot.rows_writer import RowsWriter
from fleet_sparse.wire.control import TableState
from fleet_sparse.wire.frame_format import Action, Block
from fleet_sparse.wire.row_dtype import FrameRows, RowDtype, copy_from_frame

from ..refusal import Refusal
from .checks import check_finite, check_learning_rate, scaled_gradients
from .mutations import Assignment, Average, Change, CopyMutation, Push, Replacement, RowAssignment
from .row_asks import CacheTerms, RowAnswer
from .shrunk import TableRemoval
from .table import OnChanged, Part, Post, TableContext

_FIRST_ROW = np.zeros(1, np.int64)
_ONE = np.float32(1)
_NUM_WIDENED = 4  # gradients of that many workers are converted into memory that is used again


class _Piece(NamedTuple):
    """Values `[begin, end)` of the range, which share a learning rate, a decay and bounds."""

    begin: int
    end: int
    multiplier: float
    decay: Decay
    bounds: Bounds


class DenseRange:
    """The values `[begin, end)` of a dense array, with their optimizer state.

    Values that were never assigned or loaded have no meaning; the caller checks `assigned` first.

    Args:
        spec: Spec of the whole array.
        shard: Index of the shard whose range this is.
        num_shards: Number of shards of the job.
        placement_version: Version of their placement.

    Attributes:
        spec: As given.
        begin: Index of the first value in the whole array.
        end: Index after the last value.
        assigned: True if values were assigned or loaded.
        num_written: Number of values, from the first one on, that the newest assignment or replacement has written.
        values: float32 `(end - begin,)`. Changes in place; if something else refers to it, another array
            replaces it.
        largest_multiplier: Largest absolute learning-rate multiplier of the segments in the range.

    Raises:
        PlanError: Values and states do not fit into the memory that this machine has left.
    """

    def __init__(self, spec: DenseSpec, shard: int, num_shards: int, placement_version: int = EVEN) -> None:
        self.spec = spec
        self.begin, self.end = spec.range_of(shard, num_shards, placement_version)
        self._rule = spec.update_rule
        self._hyperparameters = dict(spec.hyperparameters)
        needed, available = 4 * self.size * (1 + self._rule.num_states), machine_memory.available_bytes()
        if needed > available:
            raise PlanError(
                f"dense {spec.name!r}: the range of shard {shard} takes {needed / 2**30:.1f} GiB with its states, this "
                f"machine has {available / 2**30:.1f} GiB left. Use more pservers, or embeddings for what is large"
            )
        self._pieces = _pieces(spec, self.begin, self.end)
        self.largest_multiplier = max((abs(piece.multiplier) for piece in self._pieces), default=0.0)
        self.assigned = False
        self.num_written = 0
        self._held = [np.zeros(self.size, np.float32)]  # in a list: `find_by_references` reads it there
        # Piece after piece, so that to the rule's kernel a piece is like a row with its states behind it.
        self._states = np.zeros(self._rule.num_states * self.size, np.float32)
        for piece in self._pieces:
            for k, value in enumerate(self._rule.initial_state(self._hyperparameters)):
                self._states_of(piece)[k] = value

    @property
    def size(self) -> int:
        """Number of values."""
        return self.end - self.begin

    @property
    def values(self) -> NDArray[np.float32]:
        """The values, `(size,)`. To keep a reference makes the next change copy them."""
        return self._held[0]

    @property
    def num_bytes(self) -> int:
        """Memory of values and states."""
        return self.values.nbytes + self._states.nbytes

    def assign(self, values: NDArray[np.float32], begin: int = 0) -> None:
        """Sets the values from `begin` on, as `replace`; does nothing if all were assigned or loaded before."""
        if not self.assigned:
            self.replace(0, values, begin)

    def replace(self, number: int, values: NDArray[np.float32], begin: int = 0) -> None:
        """Replaces the values from `begin` on for number 0, the rule's k-th state for number k.

        Several calls, in order, replace all values; from the first one to the last one they do not count as assigned.
        """
        end = begin + len(values)
        if number == 0:
            self._own_values()[begin:end] = values
            self.num_written, self.assigned = end, end == self.size
            return
        for piece in self._pieces:
            first, last = max(piece.begin, begin), min(piece.end, end)
            if first < last:
                state = self._states_of(piece)[number - 1]
                state[first - piece.begin : last - piece.begin] = values[first - begin : last - begin]

    def push(self, grads: NDArray[np.float32], learning_rate: float, step: int, begin: int = 0) -> None:
        """Applies finite gradients `(n,)` to the values from `begin` on, all of them if the rule needs whole rows.

        The learning rate is multiplied by that of each segment. Each segment's gradient is clipped to its bounds, then
        its decay is added.

        Raises:
            ValueError: The array is read-only. Nothing changed.
        """
        kernel, num_states = self._rule.kernel, self._rule.num_states
        if kernel is None:
            raise ValueError(f"dense {self.spec.name!r}: it is read-only, nothing can be pushed")
        all_values = self._own_values()
        for piece in self._pieces:
            first, last = max(piece.begin, begin), min(piece.end, begin + len(grads))
            if first >= last:
                continue
            values, piece_grads = all_values[first:last], piece.bounds.clipped(grads[first - begin : last - begin])
            if any(piece.decay):
                plain, piece_grads = piece_grads, np.empty_like(values)
                coefficients = np.array(piece.decay, np.float32)
                add_decay(values, 0, _FIRST_ROW, plain, last - first, coefficients, piece_grads)
            scalars = self._rule.scalars(self._hyperparameters, learning_rate * piece.multiplier, step)
            if last - first == piece.end - piece.begin:
                states = self._states[num_states * piece.begin : num_states * piece.end]
                kernel(values, 0, states, 0, 0, _FIRST_ROW, piece_grads, last - first, scalars)
            else:  # the kernel needs the states of these values behind one another
                of_values = self._states_of(piece)[:, first - piece.begin : last - piece.begin]
                states = of_values.reshape(-1)
                kernel(values, 0, states, 0, 0, _FIRST_ROW, piece_grads, last - first, scalars)
                of_values[:] = states.reshape(of_values.shape)

    def read(self, number: int) -> NDArray[np.float32]:
        """Returns the present values `(size,)` for number 0, the rule's k-th state for number k.

        The values are a read-only view that does not change later; they are copied only if one is left at their next
        change.
        """
        if number:
            state: NDArray[np.float32] = self.export_states()[number - 1]
            return state
        view = self.values[:]
        view.flags.writeable = False
        return view

    @property
    def num_states(self) -> int:
        """Number of states of the rule."""
        return self._rule.num_states

    def export_states(self) -> NDArray[np.float32]:
        """Returns a copy of the states, `(num_states, size)`."""
        if not self._pieces:
            return np.zeros((self._rule.num_states, 0), np.float32)
        return np.concatenate([self._states_of(piece) for piece in self._pieces], axis=1)

    def load(self, values: NDArray[np.float32], states: NDArray[np.float32]) -> None:
        """Replaces values `(size,)` and states `(num_states, size)`."""
        for number, each in enumerate([values, *states]):
            self.replace(number, each)

    def _own_values(self) -> NDArray[np.float32]:
        """Returns the values, to be changed. A reply that waits to be sent keeps the array that it refers to."""
        if find_by_references(self._held, UNUSED, 0, 1) < 0:
            self._held[0] = self._held[0].copy()
        return self._held[0]

    def _states_of(self, piece: _Piece) -> NDArray[np.float32]:
        num_states = self._rule.num_states
        flat = self._states[num_states * piece.begin : num_states * piece.end]
        return flat.reshape(num_states, piece.end - piece.begin)


def _pieces(spec: DenseSpec, begin: int, end: int) -> list[_Piece]:
    """Returns the segments inside `[begin, end)`, counted from `begin`; neighbours with equal settings are one piece.

    With a rule that needs whole rows each segment is a piece of its own.
    """
    joins = not spec.update_rule.needs_whole_row
    pieces: list[_Piece] = []
    for segment in spec.segments:
        first, last = max(segment.offset, begin) - begin, min(segment.offset + segment.size, end) - begin
        if first >= last:
            continue
        piece = _Piece(first, last, segment.learning_rate, segment.decay, segment.bounds)
        if joins and pieces and pieces[-1][2:] == piece[2:]:
            pieces[-1] = pieces[-1]._replace(end=last)
        else:
            pieces.append(piece)
    return pieces


class DenseCut:
    """A copy of the values of a range and their states; `TableCut` describes its methods."""

    def __init__(self, dense: DenseRange, optimizer_step: int) -> None:
        self._write = partial(
            RowsWriter.write_dense,
            spec=dense.spec,
            optimizer_step=optimizer_step,
            begin=dense.begin,
            end=dense.end,
            assigned=dense.assigned,
            values=dense.values.copy(),
            states=dense.export_states(),
        )

    def back_memory(self) -> None:
        """Does nothing: the copy is complete."""

    def export(self, writer: RowsWriter, post: Post, on_changed: OnChanged | None = None) -> None:
        """As `TableCut.export`."""
        self._write(writer)

    def release(self) -> None:
        """Does nothing: the copy is freed with the object."""

    def end(self, *, kept: bool) -> None:
        """Does nothing: the copy is freed with the object, and the next delta contains all values again."""


class DenseTable:
    """One shard's range of a dense array; `Table` describes its methods.

    Args:
        spec: The whole array.
        context: What it shares with the shard's other tables.

    Attributes:
        spec: As given.
        range: The values.

    Raises:
        PlanError: As `DenseRange`.
    """

    is_selectable = False
    is_incremental = False

    def __init__(self, spec: DenseSpec, context: TableContext) -> None:
        self.spec = spec
        self.where = f"dense {spec.name!r}"
        self.optimizer_step = 0
        self.num_parameters = len(spec.segments)
        self.range = DenseRange(spec, context.shard, context.placement.num_shards, context.placement.version)
        self._table_id = spec.table_id
        self._merged_memory = ReusedMemory(np.float32, num_kept=1)
        self._joined_memory = ReusedMemory(np.float32, num_kept=_NUM_WIDENED)
        self._widened_memory = ReusedMemory(np.float32, num_kept=_NUM_WIDENED)

    @property
    def state(self) -> TableState:
        """As `Table.state`."""
        return TableState(self.spec.name, self.optimizer_step, 0, self.range.assigned, self.spec.to_json())

    @property
    def num_bytes(self) -> int:
        """As `Table.num_bytes`."""
        return self.range.num_bytes

    @property
    def is_partly_assigned(self) -> bool:
        """As `Table.is_partly_assigned`."""
        return self.range.num_written > 0 and not self.range.assigned

    def check(self, block: Block) -> None:
        """As `Table.check`."""
        if block.ids is not None:
            raise Refusal(ErrorCode.SCHEMA, f"{self.where}: the block has ids")
        if block.dim != 1:
            raise Refusal(ErrorCode.SCHEMA, f"{self.where}: rows have dim {block.dim}, the table has dim 1")
        if block.rows is not None and block.rows.shape != (block.count, 1):
            raise Refusal(ErrorCode.MALFORMED, f"{self.where}: columns are not of {block.count} ids")
        if block.offset + block.count > self.range.size:
            raise Refusal(
                ErrorCode.SCHEMA,
                f"{self.where}: {block.count} values from {block.offset} on, the range of this shard has "
                f"{self.range.size}",
            )

    def check_pull(self, block: Block) -> None:
        """As `Table.check_pull`."""
        self._check_assigned()
        self._check_state(block.optimizer_step)

    def widened(self, rows: FrameRows, dtype: RowDtype) -> NDArray[np.float32]:
        """As `Table.widened`."""
        values = self._widened_memory.lend(rows.size)[: rows.size].reshape(rows.shape)
        copy_from_frame(rows, dtype, values)
        return values

    def check_push(self, block: Block, grads: NDArray[np.float32], *, is_staged: bool) -> Push:
        """As `Table.check_push`."""
        self._check_assigned()
        if not is_staged and self.spec.update_rule.needs_whole_row and block.count < self.range.size:
            raise Refusal(
                ErrorCode.SCHEMA,
                f"{self.where}: {block.count} gradients of {self.range.size}, rule {self.spec.rule!r} needs all at "
                "once. Set FLEET_SPARSE_MAX_FRAME_BYTES higher, for workers and pservers",
            )
        check_learning_rate(self.where, block.learning_rate * max(self.range.largest_multiplier, 1.0))
        grads = grads.reshape(-1)
        if block.gradient_scale != 1.0:
            grads = scaled_gradients(grads, block.gradient_scale, is_staged=is_staged)
        check_finite(self.where, "gradients", grads)
        numbers = block.learning_rate, block.optimizer_step, block.gradient_scale
        return Push(self._table_id, None, grads, *numbers, begin=block.offset)

    def check_change(self, block: Block, rows: NDArray[np.float32]) -> Change:
        """Unreachable: `check` refuses ids."""
        raise TypeError(f"{self.where}: only rows of a table have copies")

    def ask(self, block: Block, terms: CacheTerms) -> RowAnswer:
        """Unreachable: `check` refuses ids."""
        raise TypeError(f"{self.where}: only rows of a table have copies")

    def forget_copies(self) -> None:
        """Does nothing: only rows of a table have copies."""

    def apply_change(self, change: Change) -> int:
        """Unreachable: `check` refuses ids."""
        raise TypeError(f"{self.where}: only rows of a table have copies")

    def assign_rows(self, assignment: RowAssignment) -> int:
        """Unreachable: `check` refuses ids."""
        raise TypeError(f"{self.where}: only rows of a table have copies")

    def check_assignment(self, block: Block, values: NDArray[np.float32]) -> Assignment:
        """As `Table.check_assignment`."""
        values = values.reshape(-1)
        if not self.range.assigned:
            self._check_follows(block)
        check_finite(self.where, "values", values)
        return Assignment(self._table_id, values, block.offset)

    def check_replacement(self, block: Block, values: NDArray[np.float32]) -> Replacement:
        """As `Table.check_replacement`."""
        values = values.reshape(-1)
        if block.action is Action.REPLACE:
            self._check_follows(block)
            check_finite(self.where, "values", values)
            return Replacement(self._table_id, 0, values, block.optimizer_step, block.offset)
        if block.optimizer_step == 0:
            raise Refusal(ErrorCode.MALFORMED, f"{self.where}: a state has number 0, the first one has 1")
        self._check_state(block.optimizer_step)
        return Replacement(self._table_id, block.optimizer_step, values, begin=block.offset)

    def pull(self, block: Block, out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """Returns the values `(count, 1)`, or the state that `block.optimizer_step` numbers."""
        self.check_pull(block)
        values = self.range.read(block.optimizer_step)[block.offset : block.offset + block.count].reshape(-1, 1)
        if out is None:
            return values
        out[:] = values
        return out

    def apply(self, push: Push) -> int:
        """Applies a push with the array's rule; returns 0, the number of rows updated."""
        self.range.push(push.grads, push.learning_rate, push.step, push.begin)
        self.optimizer_step = max(self.optimizer_step, push.step)
        return 0

    def assign(self, assignment: Assignment) -> None:
        """As `Table.assign`."""
        self.range.assign(assignment.values, assignment.begin)

    def replace(self, replacement: Replacement) -> None:
        """As `Table.replace`."""
        self.range.replace(replacement.number, replacement.values, replacement.begin)
        if replacement.number == 0:
            self.optimizer_step = replacement.step

    def judge(self, criteria: Sequence[Criterion], decay: float) -> NDArray[np.int16]:
        """Returns no element: a dense array has no rows."""
        return np.empty(0, np.int16)

    def removals(self, criteria: Sequence[Criterion], judged: NDArray[np.int16]) -> list[TableRemoval]:
        """Returns nothing: a dense array has no rows to remove."""
        return []

    def check_shrink(self) -> None:
        """Does nothing: a dense array has no rows to remove."""

    def shrink(self, judged: NDArray[np.int16], decay: float) -> int:
        """Returns 0: a dense array has no rows to remove."""
        return 0

    def adopt(self, spec: TableSpec) -> None:
        """Unreachable: a dense array has no entry."""
        raise TypeError(f"{self.where}: has no entry")

    def end_day(self) -> None:
        """Does nothing: days are counted for rows."""

    def merge(self, contributions: Sequence[Sequence[Push]], scale: str) -> Push:
        """As `Table.merge`."""
        scale = SUM if self.spec.update_rule.is_summed else scale
        average = Average.of([[self._whole(pushes)] for pushes in contributions], scale)
        if len(average.parts) == 1:
            return average.of_single_part()
        (first, first_factor), (second, second_factor), *others = average.parts
        merged = self._merged_memory.lend(len(first.grads))[: len(first.grads)]
        # Only the last addition divides: by 1 no value changes. No sum is finite again after it was not.
        divisors = [*[_ONE] * len(others), average.total]
        is_finite = add_two(first.grads, first_factor, second.grads, second_factor, divisors[0], merged)
        for (push, factor), divisor in zip(others, divisors[1:], strict=True):
            is_finite = add_one_more(merged, push.grads, factor, divisor)
        if not is_finite:
            check_finite(self.where, "merged gradients", merged)
        return first._replace(grads=merged)

    def _whole(self, pushes: Sequence[Push]) -> Push:
        """One push with all values of the range, of those of a worker.

        Raises:
            Refusal: They do not cover the range.
        """
        size, end = self.range.size, 0
        for push in pushes:
            if push.begin != end:
                raise Refusal(
                    ErrorCode.MALFORMED,
                    f"{self.where}: gradients from {push.begin} on in a step, should be from {end} on",
                )
            end += len(push.grads)
        if end != size:
            raise Refusal(
                ErrorCode.MALFORMED, f"{self.where}: {end} gradients in a step, the range of this shard has {size}"
            )
        if len(pushes) == 1:
            return pushes[0]
        grads = self._joined_memory.lend(size)[:size]
        for push in pushes:
            grads[push.begin : push.begin + len(push.grads)] = push.grads
        return pushes[0]._replace(grads=grads, begin=0)

    def _check_follows(self, block: Block) -> None:
        """Checks that values begin at 0, or where those of the block before ended."""
        if block.offset not in (0, self.range.num_written):
            raise Refusal(
                ErrorCode.MALFORMED,
                f"{self.where}: values from {block.offset} on, should be from 0 or {self.range.num_written} on",
            )

    def squared_norms(self, push: Push) -> NDArray[np.float64]:
        """Returns the sum of squares of each segment's gradient, as far as it lies in this range."""
        return clip.squared_norms([], [self._part_of(push)])

    def clip(self, push: Push, factors: NDArray[np.float32]) -> Push:
        """As `Table.clip`."""
        return push._replace(grads=clip.scaled([], [self._part_of(push)], factors)[1][0])

    def changes(self, push: Push | CopyMutation, block: Block) -> NDArray[np.bool_]:
        """Returns all False: every reply has the dense values that its worker asks for."""
        return np.zeros(block.count, np.bool_)

    def capture(self, *, only_changed: bool, ends_day: bool, left_out: Sequence[Criterion] = ()) -> DenseCut:
        """As `Table.capture`."""
        return DenseCut(self.range, self.optimizer_step)

    def restore_changes(self, ids: NDArray[np.int64], *, is_removed: bool, is_counter: bool) -> None:
        """Does nothing: every delta contains all values."""

    def source_shards(self, manifest: Manifest) -> list[int]:
        """As `Table.source_shards`."""
        of_all = manifest.num_shards, manifest.placement_version or EVEN
        ranges = [self.spec.range_of(shard, *of_all) for shard in range(manifest.num_shards)]
        here = self.range
        return [shard for shard, (begin, end) in enumerate(ranges) if max(begin, here.begin) < min(end, here.end)]

    def load(self, parts: Sequence[Part], *, is_delta: bool, check_active: Callable[[], None]) -> None:
        """As `Table.load`. Without a value in one of the parts the range stays unassigned."""
        values = np.empty(self.range.size, np.float32)
        states = np.empty((self.range.num_states, self.range.size), np.float32)
        for file, section in parts:
            check_active()
            if (section.begin, section.end) != section.spec.range_of(
                file.shard, file.num_shards, file.placement_version
            ):
                raise file.corrupt(f"{self.where}: it is not the range of its shard", file.index_offset)
            file.copy_dense(section, self.range.begin, values, states)
        if all(section.assigned for _, section in parts):
            self.range.load(values, states)

    def close(self) -> None:
        """Does nothing: the arrays are freed with the object."""

    def _check_state(self, number: int) -> None:
        if number > self.range.num_states:
            raise Refusal(
                ErrorCode.SCHEMA,
                f"{self.where}: there is no state {number}, rule {self.spec.rule!r} has {self.range.num_states}",
            )

    def _check_assigned(self) -> None:
        if not self.range.assigned:
            raise Refusal(ErrorCode.NOT_READY, f"{self.where}: no worker assigned its first values yet")

    def _part_of(self, push: Push) -> DensePart:
        return DensePart(self.spec, push.grads, self.range.begin)
