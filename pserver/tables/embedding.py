"""EmbeddingTable: a table whose rows are found by id."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core import clip
from fleet_sparse.core import table_words as words
from fleet_sparse.core.criteria import Criterion, smallest_ids
from fleet_sparse.core.kernels_ownership import count_misrouted
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import ErrorCode
from fleet_sparse.snapshot.manifest import Manifest
from fleet_sparse.snapshot.open_snapshot import shards_with
from fleet_sparse.wire.control import TableState
from fleet_sparse.wire.frame_format import Block
from fleet_sparse.wire.row_dtype import FrameRows, RowDtype, from_frame

from ..refusal import Refusal
from ..storage.table_store import TableStore
from .admission import Admission, statistics_of
from .checks import check_finite, check_learning_rate, scaled_gradients
from .embedding_cut import EmbeddingCut, JoinedCut
from .mutations import Assignment, Average, Change, CopyMutation, Push, Replacement, RowAssignment
from .row_asks import CacheTerms, RowAnswer, answer
from .row_limit import MAX_UNCHECKED_IDS, UNLIMITED, RowLimit
from .shrunk import TableRemoval
from .table import Part, TableContext, TableCut

_OfIds = TypeVar("_OfIds", Push, Change, RowAssignment)


class EmbeddingTable:
    """The rows of one table that a shard owns; `Table` describes its methods.

    Args:
        spec: The table.
        context: What it shares with the shard's other tables.

    Attributes:
        spec: As given.
        store: The rows.
        admission: Which ids get one; None if all do.
        limit: How many get one.
    """

    is_selectable = True
    is_incremental = True
    is_partly_assigned = False

    def __init__(self, spec: TableSpec, context: TableContext) -> None:
        self.spec = spec
        self.where = f"table {spec.name!r}"
        self._optimizer_step = np.zeros(1, np.int64)  # an array, so that it has an address
        self.num_parameters = 1
        self.store = TableStore(
            spec,
            max_pre_image_bytes=context.max_pre_image_bytes,
            huge_pages=context.huge_pages,
            layout=context.layout,
        )
        self._context = context
        self._dim = spec.dim
        self._merger = context.merger
        self._lend = context.reply_memory.lend
        self._shard_of_bucket = context.placement.shard_of_bucket
        self._num_shards = context.placement.num_shards
        self._shard = context.shard
        self._table_id = spec.table_id
        self._salt = np.uint64(spec.salt)
        self._statistics = spec.statistics
        self.admission = None if spec.entry is None else Admission(spec, context)
        row_bytes = 4 * spec.dim * (1 + spec.update_rule.num_states)
        self.limit = RowLimit(context.row_limits, row_bytes, self.where)

    @property
    def optimizer_step(self) -> int:
        """As `Table.optimizer_step`."""
        return int(self._optimizer_step[0])

    @optimizer_step.setter
    def optimizer_step(self, step: int) -> None:
        self._optimizer_step[0] = step

    @property
    def has_plain_pulls(self) -> bool:
        """True if pulls do no more than the kernels that answer frames."""
        return self.admission is None and not self.spec.has_show_click

    def describe(self, row: NDArray[np.int64]) -> bool:
        """Writes where the rows are, as `TableStore.describe`; returns True if pushes do no more than those kernels."""
        has_plain_pushes = self.store.describe(row)
        row[words.DIM], row[words.OPTIMIZER_STEP] = self._dim, self._optimizer_step.ctypes.data
        if not self._has_unchecked_room:
            self.limit.num_free(self.store.num_rows)
        return has_plain_pushes and self._has_unchecked_room and self.admission is None and not self._statistics

    def note_growth(self, num_before: int) -> None:
        """As `TableStore.note_growth`."""
        self.store.note_growth(num_before)
        if not self._has_unchecked_room:
            self._context.layout.change(self._table_id)

    @property
    def state(self) -> TableState:
        """As `Table.state`."""
        return TableState(
            self.spec.name,
            self.optimizer_step,
            self.store.num_rows,
            False,
            num_rejected_ids=self.limit.num_rejected,
        )

    @property
    def num_bytes(self) -> int:
        """As `Table.num_bytes`."""
        return self.store.num_bytes + (0 if self.admission is None else self.admission.num_bytes)

    def check(self, block: Block) -> None:
        """As `Table.check`."""
        dim, ids = self._dim, block.ids
        if ids is None:
            raise Refusal(ErrorCode.SCHEMA, f"{self.where}: the block lacks ids")
        if block.dim != dim:
            raise Refusal(ErrorCode.SCHEMA, f"{self.where}: rows have dim {block.dim}, the table has dim {dim}")
        if block.count != len(ids) or (block.rows is not None and block.rows.shape != (len(ids), dim)):
            raise Refusal(ErrorCode.MALFORMED, f"{self.where}: columns are not of {block.count} ids")

    def check_pull(self, block: Block) -> None:
        """As `Table.check_pull`."""
        if self._num_shards > 1:
            assert block.ids is not None, "checked by check"
            num_misrouted = count_misrouted(block.ids, self._salt, self._shard_of_bucket, self._shard)
            if num_misrouted:
                raise self._misrouted(num_misrouted)

    def widened(self, rows: FrameRows, dtype: RowDtype) -> NDArray[np.float32]:
        """As `Table.widened`."""
        return from_frame(rows, dtype)

    def check_push(self, block: Block, grads: NDArray[np.float32], *, is_staged: bool) -> Push:
        """As `Table.check_push`."""
        ids = block.ids
        assert ids is not None, "checked by check"
        check_learning_rate(self.where, block.learning_rate)
        statistics = self._checked_statistics(block) if self._statistics or block.statistics else None
        checked = self._merger.check(ids, grads, self._salt)
        if checked.num_misrouted:
            raise self._misrouted(checked.num_misrouted)
        hashes: NDArray[np.int64] | None = checked.hashes
        if checked.may_repeat or block.gradient_scale != 1.0 or not checked.is_finite:
            if checked.may_repeat:
                if statistics is not None:
                    statistics = self._merger.merge(ids, statistics, self._salt).grads
                (ids, grads), hashes = self._merger.merge(ids, grads, self._salt), None
            grads = scaled_gradients(grads, block.gradient_scale, is_staged=is_staged)
            # After merging and scaling: a sum or product of finite gradients may be infinite.
            check_finite(self.where, "gradients", grads, block.dtype)
        return Push(
            self._table_id,
            ids,
            grads,
            block.learning_rate,
            block.optimizer_step,
            block.gradient_scale,
            hashes,
            statistics,
        )

    def check_change(self, block: Block, rows: NDArray[np.float32]) -> Change:
        """As `Table.check_change`."""
        ids, hashes = self._checked_copies(block, rows, "changes")
        amounts, weight = block.statistics["counts"], block.learning_rate
        states, num_updates = block.copies.get("states"), block.copies.get("versions")
        rule = self.spec.update_rule
        if rule.merge is None:
            raise Refusal(ErrorCode.SCHEMA, f"{self.where}: changes of the rule {rule.name!r} cannot be merged")
        if not 0 < weight <= 1:
            raise Refusal(ErrorCode.MALFORMED, f"{self.where}: weight is {weight}, should be above 0 and at most 1")
        if states is not None:
            self._check_states(states, ids)
            check_finite(self.where, "changes of states", states)
        counts, what = (amounts, "counts") if num_updates is None else (num_updates, "numbers of updates")
        if not counts.all():
            raise Refusal(ErrorCode.MALFORMED, f"{self.where}: some {what} of changes are 0, should be at least 1")
        if num_updates is not None and rows[amounts == 0].any():
            raise Refusal(ErrorCode.MALFORMED, f"{self.where}: rows change by 0 updates, should be by at least 1")
        return Change(
            *(self._table_id, ids, rows, amounts, weight, block.optimizer_step),
            *(states, num_updates, hashes),
        )

    def check_assignment(self, block: Block, values: NDArray[np.float32]) -> RowAssignment:
        """As `Table.check_assignment`, of rows."""
        ids, hashes = self._checked_copies(block, values, "rows")
        states = block.copies.get("states")
        if states is None:
            states = np.empty((len(ids), 0, self._dim), np.float32)
        self._check_states(states, ids)
        return RowAssignment(self._table_id, ids, values, states, block.optimizer_step, hashes)

    def check_replacement(self, block: Block, values: NDArray[np.float32]) -> Replacement:
        """Refuses: rows are pushed."""
        raise Refusal(ErrorCode.MALFORMED, f"{self.where}: rows of a table are pushed, not assigned")

    def pull(self, block: Block, out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """As `Table.pull`."""
        ids = block.ids
        assert ids is not None, "checked by check"
        count, dim = block.count, self._dim
        rows = self._lend(count * dim).reshape(count, dim) if out is None else out
        if block.optimizer_step:
            self.check_pull(block)
            rows[:] = self.store.has_rows(ids)[:, None]
            return rows
        buckets = self._shard_of_bucket if self._num_shards > 1 else None
        if num_misrouted := self.store.pull(ids, rows, buckets, self._shard):
            raise self._misrouted(num_misrouted)
        if self.admission is not None:
            _clear_not_admitted(self.admission, ids, self.store.has_rows(ids), rows)
        return rows

    def ask(self, block: Block, terms: CacheTerms) -> RowAnswer:
        """As `Table.ask`."""
        self.check_pull(block)
        assert block.ids is not None, "checked by check"
        versions, (bound, num_workers, counts_steps) = block.copies["versions"], terms
        return answer(self.store, bound, num_workers, block.ids, versions, self._read_rows, counts_steps=counts_steps)

    def _read_rows(self, row_indices: NDArray[np.int64], ids: NDArray[np.int64]) -> NDArray[np.float32]:
        rows = self.store.rows_at(row_indices, ids)
        if self.admission is not None:
            _clear_not_admitted(self.admission, ids, row_indices >= 0, rows)
        return rows

    def forget_copies(self) -> None:
        """As `Table.forget_copies`."""
        self.store.drop_clocks()

    def apply(self, push: Push) -> int:
        """As `Table.apply`."""
        if self.admission is not None:
            push = self._admitted(push, self.admission)
        assert push.ids is not None, "pushes to a table have ids"
        if self.store.num_rows + len(push.ids) > self.limit.unchecked_rows:
            push = self._within_limit(push, push.ids)
        assert push.ids is not None, "pushes to a table have ids"
        self.store.push(
            push.ids, push.grads, push.learning_rate, push.step, push.hashes, push.statistics, push.num_updates
        )
        self.optimizer_step = max(self.optimizer_step, push.step)
        return len(push.ids)

    def max_rows_for(self, num_ids: int, before: int) -> int:
        """Decides how many rows the table may have after a change.

        Args:
            num_ids: Largest number of ids of the change.
            before: What was decided for the change before. It stays so if that makes no difference.

        Returns:
            The largest number of rows; `UNLIMITED` if all ids may have one.
        """
        most, max_rows = self.store.num_rows + num_ids, UNLIMITED
        if most > self.limit.unchecked_rows and num_ids > (num_free := self._num_free()):
            max_rows = self.store.num_rows + num_free
        return before if max_rows == UNLIMITED and most <= before else max_rows

    def limit_rows(self, max_rows: int | None) -> None:
        """Sets the largest number of rows; with None the table decides for each change."""
        self.limit.decided = max_rows

    def apply_change(self, change: Change) -> int:
        """As `Table.apply_change`."""
        change = self._with_rows(change)
        if len(change.ids):  # else states may have any shape
            self.store.merge(
                *(change.ids, change.rows, change.amounts, change.weight),
                state_changes=change.states,
                num_updates=change.num_updates,
                hashes=change.hashes,
            )
        self.optimizer_step = max(self.optimizer_step, change.step)
        return len(change.ids)

    def assign_rows(self, assignment: RowAssignment) -> int:
        """As `Table.assign_rows`."""
        assignment = self._with_rows(assignment)
        if len(assignment.ids):  # else states may have any shape
            self.store.set_rows(assignment.ids, assignment.rows, assignment.states)
        self.optimizer_step = max(self.optimizer_step, assignment.step)
        return len(assignment.ids)

    def assign(self, assignment: Assignment) -> None:
        """Unreachable: assignments of rows are `assign_rows`."""
        raise TypeError(f"{self.where}: rows of a table are pushed, not assigned")

    def replace(self, replacement: Replacement) -> None:
        """Unreachable: `check_replacement` refuses."""
        raise TypeError(f"{self.where}: rows of a table are pushed, not assigned")

    def judge(self, criteria: Sequence[Criterion], decay: float) -> NDArray[np.int16]:
        """As `Table.judge`."""
        return self.store.judge(criteria, decay)

    def removals(self, criteria: Sequence[Criterion], judged: NDArray[np.int16]) -> list[TableRemoval]:
        """As `Table.removals`."""
        ids, number = self.store.selected_ids(judged)
        found = [ids[number == index] for index in range(len(criteria))]
        return [TableRemoval(len(each), smallest_ids(each, self.spec.salt)) for each in found]

    def check_shrink(self) -> None:
        """As `Table.check_shrink`."""
        self.store.check_shrink()
        if self.admission is not None and self.admission.counters is not None:
            self.admission.counters.store.check_shrink()

    def shrink(self, judged: NDArray[np.int16], decay: float) -> int:
        """As `Table.shrink`."""
        if decay != 1.0:
            self.store.decay(decay)
            if self.admission is not None:
                self.admission.decay(decay)
        removed = self.store.shrink(judged)
        if len(removed) and self.admission is not None and self.admission.counters is not None:
            self.admission.counters.forget(removed)
        return len(removed)

    def end_day(self) -> None:
        """As `Table.end_day`."""
        self.store.end_day()

    def merge(self, contributions: Sequence[Sequence[Push]], scale: str) -> Push:
        """As `Table.merge`."""
        average = Average.of(contributions, scale)
        if len(average.parts) == 1:
            return average.of_single_part()
        pushes = [push for push, _ in average.parts]
        ids = np.concatenate([push.ids for push in pushes if push.ids is not None])
        grads, begin = np.empty((len(ids), self.spec.dim), np.float32), 0
        with np.errstate(over="ignore", invalid="ignore"):
            for push, factor in average.parts:
                end = begin + len(push.grads)
                np.multiply(push.grads, factor, out=grads[begin:end])
                begin = end
            merged = self._merger.merge(ids, grads, self._salt)
            np.divide(merged.grads, average.total, out=merged.grads)
        check_finite(self.where, "merged gradients", merged.grads)
        statistics = None
        if self._statistics:  # neither scaled nor averaged
            parts = [push.statistics for push in pushes if push.statistics is not None]
            statistics = self._merger.merge(ids, np.concatenate(parts), self._salt).grads
        num_updates = None
        if self.store.has_clocks:
            ones = np.ones((len(ids), 1), np.float32)
            num_updates = self._merger.merge(ids, ones, self._salt).grads.reshape(-1).astype(np.uint32)
        return pushes[0]._replace(
            ids=merged.ids, grads=merged.grads, hashes=None, statistics=statistics, num_updates=num_updates
        )

    def squared_norms(self, push: Push) -> NDArray[np.float64]:
        """As `Table.squared_norms`."""
        return clip.squared_norms([push.grads], [])

    def clip(self, push: Push, factors: NDArray[np.float32]) -> Push:
        """As `Table.clip`."""
        return push._replace(grads=clip.scaled([push.grads], [], factors)[0][0])

    def changes(self, push: Push | CopyMutation, block: Block) -> NDArray[np.bool_]:
        """As `Table.changes`."""
        assert push.ids is not None, "pushes to a table have ids"
        assert block.ids is not None, "checked by check"
        return self._merger.among(block.ids, push.ids, self._salt)

    def capture(self, *, only_changed: bool, ends_day: bool, left_out: Sequence[Criterion] = ()) -> TableCut:
        """As `Table.capture`."""
        cut = EmbeddingCut(
            self.store, self.optimizer_step, only_changed=only_changed, ends_day=ends_day, left_out=left_out
        )
        counters = None if self.admission is None else self.admission.counters
        if counters is None or left_out:  # a snapshot that leaves rows out has nothing of ids without a row
            return cut
        try:
            return JoinedCut([cut, EmbeddingCut(counters.store, 0, only_changed=only_changed, ends_day=False)])
        except BaseException:
            cut.end(kept=False)
            raise

    def restore_changes(self, ids: NDArray[np.int64], *, is_removed: bool, is_counter: bool) -> None:
        """As `Table.restore_changes`. Those of counters that an adopted spec dropped have no effect."""
        counters = None if self.admission is None else self.admission.counters
        if not is_counter:
            self.store.restore_changes(ids, is_removed=is_removed)
        elif counters is not None:
            counters.store.restore_changes(ids, is_removed=is_removed)

    def source_shards(self, manifest: Manifest) -> list[int]:
        """As `Table.source_shards`."""
        return shards_with(manifest, self._owned)

    def load(self, parts: Sequence[Part], *, is_delta: bool, check_active: Callable[[], None]) -> None:
        """As `Table.load`. An id that is in two files of a full snapshot is refused."""
        of_counters = [part for part in parts if part[1].spec.counts_for is not None]
        for file, section in of_counters:
            if section.spec != self.spec.counters:
                raise file.corrupt(f"{section.spec.where}: it has not the counters of {self.where}", file.index_offset)
        if self.admission is not None and self.admission.counters is not None:
            store = self.admission.counters.store
            self._load_into(store, of_counters, is_delta=is_delta or store.num_rows > 0, check_active=check_active)
        of_rows = [part for part in parts if part[1].spec.counts_for is None]
        self._load_into(self.store, of_rows, is_delta=is_delta, check_active=check_active)

    def _load_into(
        self, store: TableStore, parts: Sequence[Part], *, is_delta: bool, check_active: Callable[[], None]
    ) -> None:
        num_days = max((section.num_days for _, section in parts), default=0)
        if num_days > store.num_days:  # a pserver may have died before the day ended on it, too
            store.set_num_days(num_days)
        # All at once, because each removal reads the whole index.
        if removed := [ids for file, section in parts for ids in file.removed(section, self._owned)]:
            store.remove(np.concatenate(removed), noted=False)
        store.reserve(sum(file.num_rows(section, self._owned) for file, section in parts))
        for file, section in parts:
            with closing(file.rows_ahead(section, self._owned)) as blocks:
                for rows in blocks:
                    check_active()
                    num_before = store.num_rows
                    store.load(rows)
                    if not is_delta and store.num_rows != num_before + len(rows.ids):
                        raise file.corrupt(f"{section.spec.where}: an id occurs twice", file.index_offset)

    def adopt(self, spec: TableSpec) -> None:
        """As `Table.adopt`."""
        admission = None if spec.entry is None else Admission(spec, self._context)
        self.store.adopt(spec)
        if self.admission is not None and (admission is None or not admission.take_counters(self.admission)):
            self.admission.close()
        self.spec, self._statistics, self.admission = spec, spec.statistics, admission

    def close(self) -> None:
        """As `Table.close`."""
        self.store.close()
        if self.admission is not None:
            self.admission.close()

    def _checked_statistics(self, block: Block) -> NDArray[np.float32]:
        """Returns the statistics of a push, `(n, width)`."""
        given = tuple(block.statistics)
        if given != self._statistics:
            raise Refusal(
                ErrorCode.SCHEMA,
                f"{self.where}: the push has the columns {', '.join(given) or 'ids and rows alone'}, it "
                f"needs {', '.join(self._statistics) or 'none'}",
            )
        statistics = statistics_of(block.statistics, given)
        check_finite(self.where, f"values of {' and '.join(given)}", statistics)
        return statistics

    def _admitted(self, push: Push, admission: Admission) -> Push:
        """Counts the ids of a push that have no row, and leaves out those that get none.

        What the push itself says of an id has an effect from the next push on.
        """
        ids, statistics = push.ids, push.statistics
        assert ids is not None, "pushes to a table have ids"
        is_absent = ~self.store.has_rows(ids)
        if not is_absent.any():
            return push
        hashes = admission.hashes_of(ids) if push.hashes is None else push.hashes
        if is_absent.all():
            absent: slice | NDArray[np.int64] = slice(None)
        else:
            absent = np.flatnonzero(is_absent)
        counted = [name in admission.statistics for name in self._statistics]
        said = None if statistics is None else np.ascontiguousarray(statistics[absent][:, counted])
        is_admitted, totals = admission.count(ids[absent], hashes[absent], said)
        if statistics is not None and is_admitted.any():
            statistics = statistics.copy()  # a new row begins with what was counted before
            of_new = statistics[absent]
            of_new[:, counted] += np.where(is_admitted[:, None], totals, np.float32(0))
            statistics[absent] = of_new
        if is_admitted.all():
            return push._replace(statistics=statistics)
        is_inside = ~is_absent
        is_inside[absent] = is_admitted
        return push._replace(hashes=hashes, statistics=statistics).of_ids(np.flatnonzero(is_inside))

    def _checked_copies(
        self, block: Block, rows: NDArray[np.float32], what: str
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the ids of a block about copies, which are distinct, and their hashes."""
        ids = block.ids
        assert ids is not None, "checked by check"
        if self._statistics:
            raise Refusal(ErrorCode.SCHEMA, f"{self.where}: it counts {', '.join(self._statistics)} of each push")
        checked = self._merger.check(ids, rows, self._salt)
        if checked.num_misrouted:
            raise self._misrouted(checked.num_misrouted)
        if not checked.is_finite:
            check_finite(self.where, what, rows, block.dtype)
        if checked.may_repeat and len(np.unique(ids)) < len(ids):
            raise Refusal(ErrorCode.MALFORMED, f"{self.where}: {what} repeat ids")
        return ids, checked.hashes

    def _check_states(self, states: NDArray[Any], ids: NDArray[np.int64]) -> None:
        shape = len(ids), self.spec.update_rule.num_states, self._dim
        if states.shape != shape and len(ids):
            raise Refusal(ErrorCode.MALFORMED, f"{self.where}: states are {states.shape}, should be {shape}")

    def _with_rows(self, change: _OfIds) -> _OfIds:
        """Leaves out the ids without a row that get none."""
        assert change.ids is not None, "of a table"
        if self.admission is not None:
            absent = np.flatnonzero(~self.store.has_rows(change.ids))
            ids = change.ids[absent]
            is_admitted, _ = self.admission.count(ids, self.admission.hashes_of(ids), None)
            if not is_admitted.all():
                change = change.of_ids(np.delete(np.arange(len(change.ids)), absent[~is_admitted]))
        assert change.ids is not None, "of a table"
        if self.store.num_rows + len(change.ids) > self.limit.unchecked_rows:
            change = self._within_limit(change, change.ids)
        return change

    def _within_limit(self, push: _OfIds, ids: NDArray[np.int64]) -> _OfIds:
        """Leaves out ids without a row for which there is no room, the last ones of the push."""
        num_free = self._num_free()
        if len(ids) <= num_free:
            return push
        rejected = np.flatnonzero(~self.store.has_rows(ids))[num_free:]
        if not len(rejected):
            return push
        self.limit.reject(len(rejected))
        return push.of_ids(np.delete(np.arange(len(ids)), rejected))

    def _num_free(self) -> int:
        num_free = self.limit.num_free(self.store.num_rows)
        if self._has_unchecked_room:
            self._context.layout.change(self._table_id)  # pushes are plain again
        return num_free

    @property
    def _has_unchecked_room(self) -> bool:
        """True if the rows of any plain push fit without a look at the limit."""
        return self.store.num_rows + MAX_UNCHECKED_IDS <= self.limit.unchecked_rows

    @property
    def _owned(self) -> NDArray[np.bool_]:
        """The buckets of this shard, `(NUM_BUCKETS,)`."""
        owned: NDArray[np.bool_] = self._shard_of_bucket == self._shard
        return owned

    def _misrouted(self, number: int) -> Refusal:
        return Refusal(ErrorCode.WRONG_SHARD, f"{self.where}: {number} ids belong to another shard than {self._shard}")


def _clear_not_admitted(
    admission: Admission, ids: NDArray[np.int64], has_rows: NDArray[np.bool_], rows: NDArray[np.float32]
) -> None:
    """Sets to 0 the rows `(n, dim)` of ids that have none and would get none."""
    absent = np.flatnonzero(~has_rows)
    rows[absent[~admission.admits(ids[absent])]] = 0
