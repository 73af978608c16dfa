"""CachedTable: copies of the rows of one table that a worker keeps, trains and may hold updates of.

It decides what is asked and sent, and does neither. A step is `plan`, `take` with the pservers' answer, `apply` with
the gradients, and `sent` once the push is accepted.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.bounds import UNBOUNDED
from fleet_sparse.core.cache_index import MAX_LEASE_STEPS, CacheIndex, Entries
from fleet_sparse.core.kernels_changes import subtract_base_states
from fleet_sparse.core.kernels_copies import (
    HELD,
    KNOWN,
    MADE,
    NUM_COUNTS,
    STATES_HELD,
    advance_versions,
    count_lags,
    divide_by_states,
    enter_copies,
    find_holding,
    find_leases,
    gather_copies,
    hold_updates,
    measure_amounts,
    note_answers,
    plan_reads,
    read_changes,
    refresh_copies,
    refresh_states,
    scatter_copies,
    settle_copies,
    subtract_bases,
)
from fleet_sparse.core.kernels_decay import add_decay
from fleet_sparse.core.kernels_rows import gather
from fleet_sparse.core.row_bound import ANY_AMOUNT, NO_VERSION, ROW_FOLLOWS, STATES_FOLLOW
from fleet_sparse.core.rules.rule import least_addends
from fleet_sparse.core.table_spec import TableSpec

from .cache_job import CacheJob, has_base_states, has_bases, may_hold
from .cache_step import NOWHERE, Answer, Arrived, Changes, Counts, Floats, Ids, Outgoing, Plan

_NO_COUNTS = np.empty(0, np.uint32)
_NO_ENTRIES = Entries(NOWHERE, NOWHERE, NOWHERE)
_MAX_OVERLAPS = 64  # plans that may wait until they are applied, and updates of others meanwhile


class Counters(NamedTuple):
    """Numbers of rows since the cache was made."""

    read: int = 0
    hit: int = 0
    asked: int = 0
    refreshed: int = 0
    entered: int = 0
    left: int = 0


class _OpenPlan(NamedTuple):
    """A plan with rows that enter, until it is applied."""

    num_entering: int
    passed: list[Ids]
    """Ids whose gradients went past the cache since: the rows that were read for the plan lack them."""


class _SentLeft(NamedTuple):
    """Rows that left the cache of the only worker, in a push whose fate is not known yet."""

    changes: list[Changes]
    trained_ids: Ids
    """Ids of the batch of the push: the pserver's rows are newer than those that left before."""


class CachedTable:
    """The cache of one table. One thread at a time uses it.

    The only worker of a job is always within the bound: it asks only about rows that enter, unless rows were removed.
    What it sends are the copies themselves.

    Args:
        spec: The table.
        capacity: Number of copies.
        job: What all caches share.

    Attributes:
        spec: As given.
        capacity: As given.
        no_answer: To a plan that asks about nothing.
        update_weight: Weight of changes, below 1 where linear updates of several workers are averaged.
    """

    def __init__(self, spec: TableSpec, capacity: int, job: CacheJob) -> None:
        self.spec, self.capacity = spec, capacity
        self._job, self._dim = job, spec.dim
        self._rule, self._hyperparameters = spec.update_rule, dict(spec.hyperparameters)
        self._index = CacheIndex(capacity, spec.salt, job.policy, job.admission)
        self._state_width = self._rule.num_states * spec.dim
        self._is_single_worker = job.num_workers == 1
        self._may_hold = may_hold(spec, job)
        self._has_bases = has_bases(spec, job)
        self._has_base_states = has_base_states(spec, job)
        is_held_mean = self._may_hold and job.weights.of_merge != 1.0
        self.update_weight = job.weights.of_merge if is_held_mean and self._rule.is_linear else 1.0
        decays = self._rule.merge(self._hyperparameters) if self._rule.merge is not None else ()
        self._decays = np.array(decays, np.float64)
        self._least = least_addends(self._rule)
        self._rows, self._states = np.zeros(capacity * self._dim, np.float32), self._zero_states(capacity)
        self._bases = np.zeros_like(self._rows) if self._has_bases else self._rows
        self._base_states = np.zeros_like(self._states) if self._has_base_states else self._states
        self._counts = np.zeros(capacity * NUM_COUNTS, np.uint32)
        by_count: Counts = self._counts.reshape(capacity, NUM_COUNTS).T  # views
        self._known = by_count[KNOWN]
        self._held, self._states_held, self._num_made = by_count[HELD], by_count[STATES_HELD], by_count[MADE]
        self._idle: NDArray[np.int64] = NOWHERE
        self._left: list[Changes] = []
        self._sent_left: deque[_SentLeft] = deque()  # by push, from the first one that had rows that left
        self._trained_ids: Ids = NOWHERE  # of the push that comes next
        self._index_version = self._num_plans = 0
        self._open: OrderedDict[int, _OpenPlan] = OrderedDict()  # those with rows that enter, by ordinal
        self._step = 0
        self._gradient_weight = np.float32(1.0 if self.update_weight != 1.0 else job.weights.of_merge)
        # The decay of a step is shared, as its gradient is.
        self._decay = np.array(spec.decay, np.float32) * (self._gradient_weight if is_held_mean else np.float32(1.0))
        self._has_decay = bool(self._decay.any())
        no_rows, no_states = (
            np.empty(shape, np.float32) for shape in ((0, spec.dim), (0, self._rule.num_states, spec.dim))
        )
        self._nothing = Arrived(no_rows, no_states, _NO_COUNTS)
        self.no_answer = Answer(np.empty(0, np.uint8), no_rows, _NO_COUNTS, no_states)
        self._bound_terms, self._num_found = job.bound.terms, np.zeros(3, np.int64)
        self._units_per_distance = 0.0 if self._is_single_worker else job.bound.terms.units_per_distance
        self._num_sharing = job.num_workers if self._may_hold else 1  # that divide the bound among them
        self._most_held = -1 if not self._may_hold else ANY_AMOUNT if job.max_held is None else job.max_held
        # Where steps are not counted, each plan has a step of its own, and no lease lasts longer than that.
        self._has_leases = not self._is_single_worker and job.steps_off_lease is not None
        self._num_read = self._num_hit = self._num_asked = 0
        self._num_refreshed = self._num_entered = self._num_left = 0

    @property
    def counters(self) -> Counters:
        """Numbers of reads, hits, checks and other events since the cache was made."""
        return Counters(
            *(self._num_read, self._num_hit, self._num_asked),
            *(self._num_refreshed, self._num_entered, self._num_left),
        )

    @property
    def num_rows(self) -> int:
        """Number of copies."""
        return self._index.num_used

    @property
    def num_held(self) -> int:
        """Number of copies with updates that are not on the pservers, and of rows that left with such updates."""
        return len(self._holding(np.arange(self.num_rows))) + sum(len(each.ids) for each in self._left)

    @property
    def num_bytes(self) -> int:
        """Memory in bytes."""
        arrays = [self._rows, self._states, self._counts]
        arrays += [self._bases] if self._has_bases else []
        arrays += [self._base_states] if self._has_base_states else []
        return self._index.num_bytes + sum(array.nbytes for array in arrays)

    def plan(self, ids: Ids, step: int, sending: Outgoing | None = None) -> Plan:
        """Decides how the rows of a batch that is trained are read.

        Args:
            ids: `(k,)`, distinct.
            step: Number of the step, or of the batch where steps are not counted; larger than in the plan before.
            sending: The push with which the pservers are asked, if the batch is that of the next step. Where other
                workers may go on before this step begins, copies are asked about late.
        """
        self._step = step = 0 if self._is_single_worker else step
        uses = self._index.use(ids, step)
        unleased, missing, late = uses.unleased, uses.missing, NOWHERE
        if self._is_single_worker and len(unleased):  # a row that follows would replace what is held
            unleased = unleased[~self._is_holding(uses.slots[unleased])]
        if sending is not None and not self._job.is_merged:
            unleased, late = NOWHERE, unleased
        entries = self._index.choose(ids[missing]) if len(missing) and self._have_room() else _NO_ENTRIES
        most_asked = len(unleased) + len(entries.indices)
        asked, plain = np.empty(most_asked, np.int64), np.empty(len(missing), np.int64)
        versions = np.empty(most_asked, np.uint32)
        if most_asked or len(missing):
            if sending is not None:  # it is applied before the asks are answered
                self._advance(sending, 1)
            plan_reads(
                *(uses.slots, unleased, missing, entries.indices, self._counts, self._state_width > 0),
                *(asked, versions, plain),
            )
            if sending is not None:
                self._advance(sending, -1)
        plain, entering = plain[: len(missing) - len(entries.indices)], missing[entries.indices]
        plan = Plan(
            *(ids, uses.slots, plain, asked, versions, entering, entries, step),
            *(self._index_version, self._num_plans, late),
        )
        self._num_plans += 1
        if len(entering):
            self._open[plan.ordinal] = _OpenPlan(len(entering), [])
        return plan

    def plain_ahead(self, ids: Ids) -> NDArray[np.int64]:
        """Returns the places of ids, `(k,)`, that `plan` will have among the plain ones, but for a few that enter.

        Nothing is returned where most rows enter, or where rows left whose updates the pservers do not have.
        """
        if self._left or not self._index.keeps_most_outside:
            return NOWHERE
        return np.flatnonzero(self._index.find(ids) < 0)

    def unplanned(self, ids: Ids) -> tuple[Plan, Arrived]:
        """Returns a plan, for `apply`, of distinct ids `(k,)` that were read in another way: no row enters."""
        slots = self._index.find(ids)
        plan = Plan(
            *(ids, slots, np.flatnonzero(slots < 0), NOWHERE, _NO_COUNTS, NOWHERE, _NO_ENTRIES),
            *(self._step, self._index_version, self._num_plans),
        )
        return plan, self._nothing

    def plan_of_parts(self, plan: Plan, arrived: Arrived, ids: Ids) -> tuple[Plan, Arrived]:
        """Returns a plan, for `apply`, of a batch that was looked up in parts, and the rows that enter.

        Args:
            plan: Of the part whose rows may enter, but for those that would take the slot of a row of another part.
            arrived: As `take` returned it.
            ids: `(k,)`, distinct: of the whole batch.
        """
        slots = self._index.find(ids)
        is_plain = slots < 0
        is_free = ~np.isin(plan.entries.slots, slots)
        entries = Entries(*(column[is_free] for column in plan.entries))
        arrived = Arrived(arrived.rows[is_free], arrived.states[is_free], arrived.versions[is_free])
        entering_ids = plan.ids[plan.entering[is_free]]
        _, places, of_entering = np.intersect1d(ids, entering_ids, assume_unique=True, return_indices=True)
        entering = np.empty(len(entering_ids), np.int64)
        entering[of_entering] = places
        is_plain[entering] = False
        whole = plan._replace(ids=ids, slots=slots, plain=np.flatnonzero(is_plain), asked=NOWHERE, versions=_NO_COUNTS)
        return whole._replace(entering=entering, entries=entries), arrived

    def drop(self, plan: Plan) -> None:
        """Takes note that no update of the batch of a plan will come. Its uses and misses stay counted."""
        self._open.pop(plan.ordinal, None)

    def late_plan(self, plan: Plan) -> Plan:
        """Returns what is left to ask about a batch whose plan was made ahead, for `refresh`."""
        late = plan.late
        versions = np.empty(len(late), np.uint32)
        plan_reads(
            *(plan.slots, late, NOWHERE, NOWHERE, self._counts, self._state_width > 0),
            *(np.empty_like(late), versions, NOWHERE),
        )
        return plan._replace(
            plain=NOWHERE, asked=late, versions=versions, entering=NOWHERE, entries=_NO_ENTRIES, late=NOWHERE
        )

    def refresh(self, plan: Plan, answer: Answer) -> None:
        """Refreshes copies by the answer to a `late_plan`, before `take`."""
        self._num_asked += len(plan.asked)
        self._note(plan, self._with_left(plan, answer) if self._left else answer)

    def count_lags(
        self, plan: Plan, answer: Answer, num_per_shard: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> None:
        """Counts how far the copies are behind that an answer refreshes; before `take`.

        Args:
            plan: Of the batch.
            answer: To its asks.
            num_per_shard: `(num_shards,)`, number of ids of the batch of each shard, in their order.
            counts: `(num_shards, num_classes)`, to which their number is added, by `kernels_copies.lag_class`.
        """
        count_lags(
            *(plan.slots, plan.asked, answer.slack, answer.versions, self._counts, num_per_shard),
            *(counts.shape[1], counts.reshape(-1)),
        )

    def take(self, plan: Plan, answer: Answer, out: Floats) -> Arrived:
        """Refreshes copies and writes the rows of all ids but the plain ones.

        Args:
            plan: Of the batch, made since `apply` was called.
            answer: To its asks.
            out: Output, `(k, dim)`, contiguous. The plain rows are there: those that left with an update get it back.

        Returns:
            The rows that enter, for `apply`.
        """
        num_read, num_entering = len(plan.ids), len(plan.entering)
        self._num_read += num_read
        self._num_hit += num_read - len(plan.plain) - num_entering
        self._num_asked += len(plan.asked) - num_entering
        if self._left:  # the pservers do not have their updates yet
            answer = self._with_left(plan, answer)
            plain = out[plan.plain]
            self._add_left(plan.ids[plan.plain], plain)
            out[plan.plain] = plain
        arrived = self._note(plan, answer) if len(plan.asked) else self._nothing
        gather_copies(self._rows, plan.slots, self._dim, out.reshape(-1))
        if num_entering:
            out[plan.entering] = arrived.rows
        return arrived

    def apply(self, plan: Plan, arrived: Arrived, grads: Floats, learning_rate: float, optimizer_step: int) -> Outgoing:
        """Trains the copies of a batch and decides what is sent.

        Rows enter and leave. The caller calls `sent` once the push was accepted; until then the updates are held.

        Args:
            plan: Of the batch.
            arrived: As `take` returned it.
            grads: `(k, dim)`, finite.
            learning_rate: Learning rate.
            optimizer_step: The rule's t.
        """
        slots, outside, left_before = plan.slots, plan.plain, tuple(self._left)
        self._trained_ids = plan.ids
        if not self._may_enter(plan):
            slots = self._index.find(plan.ids)
            outside = np.flatnonzero(slots < 0)
        elif len(plan.entering):
            slots = slots.copy()
            slots[plan.entering] = plan.entries.slots
            self._enter(plan, arrived)
        if len(outside) and self._open:
            self._note_passed(plan.ids[outside])
        copies, of_copies = slots, grads
        if len(outside):
            places = np.flatnonzero(slots >= 0)
            copies, of_copies = slots[places], grads.take(places, axis=0)
        self._train(self._rows, self._states, copies, of_copies, learning_rate, optimizer_step)
        idle = self._holding(self._idle)
        held = self._states_held[idle]
        as_gradients, due, single_updates = self._held_back(slots)
        if left_before and self._is_single_worker:
            of_left = self._train_left(left_before, plan.ids, outside, grads, learning_rate, optimizer_step)
            as_gradients = np.setdiff1d(as_gradients, of_left, assume_unique=True)
        # None of these is due: what is due is of this batch, and each of its copies holds one more update now. Where no
        # update may be held, no copy is idle and holds one.
        unused = idle[held == self._states_held[idle]]
        self._idle = self._holding(self._index.age(len(plan.ids), plan.step))
        changes = (*self._changes_of(due), *self._made(unused, has_states=True))
        return Outgoing(as_gradients, changes, single_updates)

    def flush(self, max_rows: int | None = None) -> Outgoing:
        """Returns what is held, of at most `max_rows` copies, with all states; to be sent and passed to `sent`."""
        slots = self._holding(np.arange(self.num_rows))[:max_rows]
        self._trained_ids = NOWHERE
        return Outgoing(NOWHERE, self._changes_of(slots, has_states=True), NOWHERE)

    def sent(self, outgoing: Outgoing) -> None:
        """Takes note that a push was accepted: its updates are not held any more.

        Args:
            outgoing: What `apply` or `flush` returned last.
        """
        for changes in outgoing.changes:
            has_states = changes.states.shape[1] > 0 or self._state_width == 0
            self._settle(changes.slots, changes.amounts, has_states=has_states)
        if len(outgoing.single_updates):
            self._settle(outgoing.single_updates, self._amounts_of_gradients(outgoing.single_updates), has_states=True)
        if self._is_single_worker and (self._left or self._sent_left):
            self._sent_left.append(_SentLeft(list(self._left), self._trained_ids.copy()))
        self._left.clear()

    @property
    def num_unacked(self) -> int:
        """Number of accepted pushes, since one with rows that left, which the only worker may have to repeat."""
        return len(self._sent_left)

    def note_acked(self, num_pushes: int) -> None:
        """Takes note that the oldest `num_pushes` of `num_unacked` were applied."""
        for _ in range(num_pushes):
            self._sent_left.popleft()

    def forget_versions(self) -> None:
        """Takes note that versions tell nothing any more: an accepted push has failed, or clocks began anew.

        The next use of each copy asks, and the row follows; rows that were looked up before do not enter. The only
        worker of a job asks about no copy: it will write all of them back, and what left in pushes whose fate was not
        known; or it drops them if it holds nothing back.
        """
        used = np.arange(self.num_rows)
        if not self._is_single_worker:
            self._ask_anew(used)
        elif self._may_hold:
            self._held[used], self._states_held[used] = (
                np.maximum(held[used], 1) for held in (self._held, self._states_held)
            )
            self._left[:0] = self._left_again()
        else:
            self.forget()

    def note_removals(self) -> None:
        """Takes note that a pserver removed rows, of which there may be copies.

        The next use of each copy asks, and the row follows. What the only worker of a job holds goes to the pservers as
        it is, also of a row that was removed.
        """
        used = np.arange(self.num_rows)
        self._ask_anew(used[~self._is_holding(used)] if self._is_single_worker else used)

    def forget(self) -> None:
        """Drops all copies, and what they hold."""
        self._index.clear()
        self._held[:] = self._states_held[:] = 0
        self._left.clear()
        self._sent_left.clear()
        self._idle = NOWHERE
        self._index_version += 1
        self._open.clear()

    def add_held(self, ids: Ids, out: Floats) -> None:
        """Adds the held updates to rows that were pulled, `(n, dim)`, for an evaluation. Notes no use."""
        self._add_left(ids, out)
        slots = self._index.find(ids)
        places = np.flatnonzero(slots >= 0)
        places = places[self._held[slots[places]] > 0]
        if self._is_single_worker:
            out[places] = self._copies(slots[places])
        else:
            out[places] += self._row_changes(slots[places])

    def _left_again(self) -> list[Changes]:
        """Returns the rows that left in pushes whose fate is not known, in their order, and forgets these pushes.

        Those that were trained since, or have a copy again, are left out: they were read after their push was applied.
        """
        left, trained_since = [], NOWHERE
        for sent in reversed(self._sent_left):
            for changes in reversed(sent.changes):
                is_newest = (self._index.find(changes.ids) < 0) & ~np.isin(changes.ids, trained_since)
                left.append(Changes._make(column[is_newest] for column in changes))  # the push still refers to its own
            trained_since = np.union1d(trained_since, sent.trained_ids)
        self._sent_left.clear()
        return [changes for changes in reversed(left) if len(changes.ids)]

    def _ask_anew(self, slots: NDArray[np.int64]) -> None:
        """Ends the leases of copies, whose versions tell nothing any more; rows that were looked up do not enter."""
        self._known[slots] = NO_VERSION
        self._num_made[slots] = 0  # the row on the pserver may be another, with states that lack all of them
        self._index.lease(slots, np.full(len(slots), self._step - 1, np.int64))
        self._index_version += 1

    def _advance(self, outgoing: Outgoing, sign: int) -> None:
        """Makes the versions of copies newer by what a push has of them or, with a sign of -1, older again."""
        parts = [(changes.slots, changes.amounts) for changes in outgoing.changes]
        parts.append((outgoing.single_updates, self._amounts_of_gradients(outgoing.single_updates)))
        for slots, amounts in parts:
            advance_versions(slots, amounts if sign > 0 else -amounts, self._counts)

    def _zero_states(self, num_rows: int) -> Floats:
        return np.zeros(num_rows * self._state_width, np.float32)

    def _with_left(self, plan: Plan, answer: Answer) -> Answer:
        """Returns an answer with the updates of rows that left."""
        rows, states, asked = answer.rows.copy(), answer.states.copy(), plan.ids[plan.asked]
        self._add_left(asked[answer.slack >= ROW_FOLLOWS], rows)
        self._put_left_states(asked[answer.slack == STATES_FOLLOW], states)
        return answer._replace(rows=rows, states=states)

    def _note(self, plan: Plan, answer: Answer) -> Arrived:
        """Refreshes copies and renews leases; returns the rows that enter."""
        if self._has_leases:
            self._lease(plan.slots, plan.asked, answer.slack, answer.versions, plan.step)
        elif self._is_single_worker and len(plan.asked) > len(plan.entering):
            self._index.lease(plan.slots[plan.asked], np.full(len(plan.asked), plan.step, np.int64))
        if not len(answer.rows):
            return self._nothing
        num_rows, num_states, num_entering = len(answer.rows), len(answer.states), len(plan.entering)
        slots, state_slots = np.empty(num_rows, np.int64), np.empty(num_states, np.int64)
        entering = Arrived(
            np.empty((num_entering, self._dim), np.float32),
            np.empty((num_entering, *answer.states.shape[1:]), np.float32),
            np.empty(num_entering, np.uint32),
        )
        note_answers(
            *(plan.slots, plan.asked, answer.slack, answer.versions, answer.rows.reshape(-1), self._dim),
            *(answer.states.reshape(-1), self._state_width, self._counts, slots, state_slots),
            *(entering.rows.reshape(-1), entering.states.reshape(-1), entering.versions),
        )
        num_refreshed = num_rows - num_entering
        if num_refreshed:
            self._refresh(slots, answer.rows, state_slots, answer.states)
            self._num_refreshed += num_refreshed
        return entering

    def _refresh(self, slots: NDArray[np.int64], rows: Floats, state_slots: NDArray[np.int64], states: Floats) -> None:
        """Overwrites copies and their states with those that the pservers sent; a slot of -1 has no copy."""
        if self._has_bases:
            refresh_copies(self._rows, self._bases, slots, rows.reshape(-1), self._dim, self._counts)
        else:
            scatter_copies(self._rows, slots, rows.reshape(-1), self._dim)
        if self._has_base_states:
            refresh_states(
                *(self._states, self._base_states, state_slots, states.reshape(-1), self._counts),
                *(self._dim, self._decays, self._least),
            )
        else:
            scatter_copies(self._states, state_slots, states.reshape(-1), self._state_width)

    def _lease(self, slots: Ids, asked: Ids, slack: NDArray[np.uint8], versions: Counts, step: int) -> None:
        """Leases copies as the pservers allow it; arguments as of `find_leases`."""
        assert self._job.steps_off_lease is not None, "steps are counted"
        of_asked, steps = np.empty(len(asked), np.int64), np.empty(len(asked), np.int64)
        find_leases(
            *(slots, asked, slack, versions, self._bound_terms.lag, self._bound_terms.share),
            *(self._job.num_workers, self._job.bound.has_leases, self._job.steps_off_lease, MAX_LEASE_STEPS),
            *(of_asked, steps),
        )
        self._index.lease(of_asked, step + steps)

    def _may_enter(self, plan: Plan) -> bool:
        """Returns whether the rows of a plan may enter: their slots are as they were, and no update is missing."""
        opened = self._open.pop(plan.ordinal, None)
        if plan.index_version != self._index_version:
            return False
        if not len(plan.entering) or (opened is not None and not opened.passed):
            return True
        return opened is not None and not np.isin(plan.ids[plan.entering], np.concatenate(opened.passed)).any()

    def _have_room(self) -> bool:
        """Returns whether rows of another plan may enter: not while those of the open ones could fill the cache.

        A batch that is read and never trained, as one of a table whose rows get no gradient, has an open plan until
        `_MAX_OVERLAPS` later ones are made.
        """
        while self._open and next(iter(self._open)) <= self._num_plans - _MAX_OVERLAPS:
            self._open.popitem(last=False)
        return sum(each.num_entering for each in self._open.values()) < self.capacity

    def _note_passed(self, ids: Ids) -> None:
        """Takes note of ids whose gradients go past the cache, which may enter it by other plans."""
        for opened in self._open.values():
            opened.passed.append(ids)
        while self._open and len(next(iter(self._open.values())).passed) > _MAX_OVERLAPS:  # of a step that failed
            self._open.popitem(last=False)

    def _enter(self, plan: Plan, arrived: Arrived) -> None:
        """Gives entering rows their slots; what the rows that had them hold is kept until it is sent."""
        slots = plan.entries.slots
        leaving = slots[slots < self.num_rows]
        self._num_entered += len(slots)
        self._num_left += len(leaving)
        with_updates = self._holding(leaving)
        if len(with_updates):
            (changes,) = self._made(with_updates, has_states=True)
            self._left.append(changes._replace(slots=np.full(len(with_updates), -1)))
        self._index.replace(plan.ids[plan.entering], plan.entries, plan.step)
        self._index_version += 1
        enter_copies(
            *(slots, arrived.rows.reshape(-1), arrived.states.reshape(-1), arrived.versions, self._rows, self._bases),
            *(self._dim, self._states, self._base_states, self._state_width, self._counts),
        )
        if self._has_leases:
            followed = np.full(len(slots), ROW_FOLLOWS, np.uint8)
            self._lease(slots, np.arange(len(slots)), followed, arrived.versions, plan.step)

    def _train_left(
        self,
        left: Sequence[Changes],
        ids: Ids,
        outside: NDArray[np.int64],
        grads: Floats,
        learning_rate: float,
        optimizer_step: int,
    ) -> NDArray[np.int64]:
        """Trains rows that left a job of one worker and were not sent: they will replace those of the pservers.

        Args:
            left: What they are, in the order in which they left.
            ids: `(k,)`, of the batch.
            outside: Places of ids without a copy.
            grads: `(k, dim)`.
            learning_rate: As of `apply`.
            optimizer_step: As of `apply`.

        Returns:
            The places of those among `outside` that were trained.
        """
        trained = NOWHERE
        for changes in reversed(left):  # the newest one has all updates of an id
            remaining = np.setdiff1d(outside, trained, assume_unique=True)
            _, places, of_left = np.intersect1d(ids[remaining], changes.ids, return_indices=True)
            places = remaining[places]
            rows, states = changes.rows.reshape(-1), changes.states.reshape(-1)
            self._train(rows, states, of_left, grads[places], learning_rate, optimizer_step)
            trained = np.concatenate([trained, places])
        return trained

    def _train(
        self,
        rows: Floats,
        states: Floats,
        slots: NDArray[np.int64],
        grads: Floats,
        learning_rate: float,
        optimizer_step: int,
    ) -> None:
        """Updates copies, or rows that left, with the table's clip, decay and rule, as a pserver does.

        Args:
            rows: `(n * dim,)`.
            states: `(n * num_states * dim,)`.
            slots: `(k,)`, their indices.
            grads: `(k, dim)`.
            learning_rate: As of `apply`.
            optimizer_step: As of `apply`.
        """
        assert self._rule.kernel is not None, "tables that are only read are not cached"
        if self._gradient_weight != 1.0:
            grads = grads * self._gradient_weight
        if self.spec.bounds != UNBOUNDED:
            grads = self.spec.bounds.clipped(grads)
        flat = np.ascontiguousarray(grads).reshape(-1)
        if self._has_decay:
            plain, flat = flat, np.empty(flat.size, np.float32)
            add_decay(rows, self._dim, slots, plain, self._dim, self._decay, flat)
        scalars = self._rule.scalars(self._hyperparameters, learning_rate * self.update_weight, optimizer_step)
        self._rule.kernel(
            *(rows, self._dim, states, self._state_width, 0, slots),
            *(flat, self._dim, scalars),
        )

    def _held_back(self, slots: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Holds an update of each copy back; returns what is sent nevertheless.

        These are the first and the last field of `Outgoing`, and between them the copies whose changes are due.
        """
        n, terms, per_distance = len(slots), self._bound_terms, self._units_per_distance if self._may_hold else 0.0
        as_gradients, due, single_updates = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
        hold_updates(
            *(slots, self._may_hold, self._rows, self._bases, self._dim, self._counts),
            *(self._num_sharing, terms.lag, terms.share, per_distance, self._most_held),
            *(as_gradients, due, single_updates, self._num_found),
        )
        num_gradients, num_due, num_single = self._num_found.tolist()
        return as_gradients[:num_gradients], due[:num_due], single_updates[:num_single]

    def _amounts_of_gradients(self, slots: NDArray[np.int64]) -> Counts:
        """Returns by how much pushes of single gradients make the versions of these copies newer.

        In distance the pserver alone knows how far a gradient moved the row: a copy counts it as lag. In a merged step
        the others' gradients may have moved the row back. Then they moved it by at most the sum of the distances of
        the row and of the copy, and the copy's is counted as lag, too.

        A mean weighs gradients by examples, and a worker that has none by 0. What this worker's gradient weighed is not
        known then: it counts as lag, so that the row follows in time.
        """
        if self._job.bound.drift is None:
            is_known = self._job.weights.of_merge == 1.0
            return np.full(len(slots), is_known, np.uint32)
        amounts = np.zeros(len(slots), np.uint32)
        if self._job.is_merged:
            measure_amounts(
                *(slots, self._counts, self._rows, self._bases, self._dim, self._units_per_distance),
                amounts,
            )
        return -amounts

    def _changes_of(self, slots: NDArray[np.int64], *, has_states: bool = False) -> tuple[Changes, ...]:
        """Returns the changes of copies, and those of rows that left."""
        if has_states or not self._state_width or self._is_single_worker:
            return (*self._left, *self._made(slots, has_states=True))
        without_states, with_states = np.empty(len(slots), np.int64), np.empty(len(slots), np.int64)
        n = divide_by_states(
            *(slots, self._counts, self._job.num_workers, self._job.bound.drift is None, without_states, with_states)
        )
        return (
            *self._left,
            *self._made(without_states[:n], has_states=False),
            *self._made(with_states[: len(slots) - n], has_states=True),
        )

    def _holding(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the copies of these that have updates, of the row or only of its states, that the pservers do not."""
        if not len(slots):
            return slots
        found = np.empty(len(slots), np.int64)
        return found[: find_holding(slots, self._counts, found)]

    def _is_holding(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        is_holding: NDArray[np.bool_] = (self._held[slots] > 0) | (self._states_held[slots] > 0)
        return is_holding

    def _made(self, slots: NDArray[np.int64], *, has_states: bool) -> tuple[Changes, ...]:
        if not len(slots):
            return ()
        n, num_states = len(slots), self._rule.num_states if has_states else 0
        rows, states = np.empty((n, self._dim), np.float32), np.empty((n, num_states, self._dim), np.float32)
        amounts, num_updates = np.empty(n, np.uint32), np.empty(n, np.uint32)
        read_changes(
            *(slots, self._rows, self._bases, self._dim, self._counts, self._units_per_distance),
            *(rows.reshape(-1), amounts, num_updates),
        )
        if self._is_single_worker:
            gather_copies(self._rows, slots, self._dim, rows.reshape(-1))
            gather(self._states, self._state_width, 0, slots, num_states * self._dim, states.reshape(-1))
        elif num_states:
            subtract_base_states(
                *(self._states, self._base_states, slots, num_updates, self._dim, self._decays, self._least),
                states.reshape(-1),
            )
        return (Changes(self._index.ids_of(slots), rows, amounts, states, num_updates, slots),)

    def _copies(self, slots: NDArray[np.int64]) -> Floats:
        out = np.empty(len(slots) * self._dim, np.float32)
        gather_copies(self._rows, slots, self._dim, out)
        return out.reshape(-1, self._dim)

    def _row_changes(self, slots: NDArray[np.int64]) -> Floats:
        out = np.empty(len(slots) * self._dim, np.float32)
        subtract_bases(self._rows, self._bases, slots, self._dim, out)
        return out.reshape(-1, self._dim)

    def _settle(self, slots: NDArray[np.int64], amounts: Counts, *, has_states: bool) -> None:
        """Takes note that copies were sent, which made their versions newer: they are their own bases now."""
        settle_copies(
            *(slots, amounts, self._counts, has_states, self._rows, self._bases, self._dim if self._has_bases else 0),
            *(self._states, self._base_states, self._state_width if self._has_base_states else 0),
        )

    def _add_left(self, ids: Ids, out: Floats) -> None:
        """Adds the updates of rows that left to these rows, if they are not sent yet."""
        for changes in self._left:
            _, places, of_left = np.intersect1d(ids, changes.ids, return_indices=True)
            if self._is_single_worker:
                out[places] = changes.rows[of_left]
            else:
                out[places] += changes.rows[of_left]

    def _put_left_states(self, ids: Ids, states: Floats) -> None:
        """Writes the states of rows that left a job of one worker, if they are not sent yet."""
        for changes in self._left if self._is_single_worker else ():
            _, places, of_left = np.intersect1d(ids, changes.ids, return_indices=True)
            states[places] = changes.states[of_left]
