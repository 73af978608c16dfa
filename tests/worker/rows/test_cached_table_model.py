"""CachedTable against a model: a dict of copies with clocks, which knows the bound and nothing of arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_sparse.core.cache_policies import AGED_LFU, ALL, ESTIMATE, SECOND
from fleet_sparse.core.row_bound import NO_VERSION, ROW_FOLLOWS, RowBound
from fleet_sparse.worker.rows.cache_job import CacheJob
from support.cached_jobs import CachedJob, Step

NUM_IDS, DIM = 8, 2
IDS = st.lists(st.integers(0, NUM_IDS - 1), max_size=6, unique=True)


@dataclass
class Copy:
    """A copy in the model: how many updates it has of its worker and of the others, and how many it holds."""

    clock: int | None
    own: int
    others: int
    held: int = 0


class Model:
    """One of `num_workers` workers, whose updates add 1 to the first value of a row; the others' add 1 to the second.

    Steps are not counted, so that each use of a copy asks.
    """

    def __init__(self, bound: RowBound, num_workers: int, capacity: int, admission: Any) -> None:
        assert bound.lag is not None
        self.lag, self.share, self.num_workers = bound.lag, bound.share, num_workers
        self.cached = CachedJob(CacheJob(bound, num_workers, None, AGED_LFU, admission), capacity, DIM, NUM_IDS)
        self.table = self.cached.tables[0]
        self.copies: dict[int, Copy] = {}
        self.num_own, self.num_others = [0] * NUM_IDS, [0] * NUM_IDS  # made
        self.num_steps = 0

    def max_lag(self, clock: int) -> int:
        return self.lag if self.share is None else min(self.lag, math.floor(self.share * clock))

    def max_held(self, clock: int) -> int:
        return max(0, (self.max_lag(clock) + self.num_workers) // (2 * (self.num_workers - 1)) - 1)

    def max_behind(self, clock: int) -> int:
        return self.max_lag(clock) - (self.num_workers - 1) * self.max_held(clock)

    def clock(self, id_: int) -> int:
        return int(self.cached.clocks[id_])

    def made_by_others(self, id_: int, count: int) -> None:
        self.cached.rows[id_, 1] += count
        self.cached.clocks[id_] += np.uint32(count)
        self.num_others[id_] += count

    def read(self, listed: list[int]) -> Step:
        """Reads a batch; checks what is asked and what is read."""
        ids = np.array(listed, np.int64)
        self.num_steps += 1
        plan = self.table.plan(ids, self.num_steps)
        asked = dict(zip(ids[plan.asked].tolist(), plan.versions.tolist(), strict=True))
        for id_ in self.copies.keys() & set(listed):
            known = self.copies[id_].clock
            assert asked.pop(id_) == (int(NO_VERSION) if known is None else known)
        assert set(asked.values()) <= {int(NO_VERSION)}  # of the rows that enter
        assert asked.keys() == set(ids[plan.entering].tolist())
        answer = self.cached.answered(plan)
        rows = np.full((len(ids), DIM), np.nan, np.float32)
        rows[plan.plain] = self.cached.rows[ids[plan.plain]]
        for id_, slack in zip(ids[plan.asked].tolist(), answer.slack.tolist(), strict=True):
            copy, clock = self.copies.get(id_), self.clock(id_)
            if copy is not None:
                is_due = copy.clock is None or clock - copy.clock > self.max_behind(clock)
                assert (slack >= ROW_FOLLOWS) == is_due
                if is_due:
                    copy.clock, copy.others = clock, self.num_others[id_]
        arrived = self.table.take(plan, answer, rows)
        for id_, row in zip(listed, rows.tolist(), strict=True):
            copy = self.copies.get(id_)
            others = self.num_others[id_] if copy is None else copy.others
            assert row == [self.num_own[id_], others]
        return Step(plan, arrived, rows)

    def update(self, step: Step) -> None:
        """Ends a step; checks what is sent, and what is held then."""
        ids, listed = step.plan.ids, step.plan.ids.tolist()
        grads = np.tile(np.array([-1, 0], np.float32), (len(ids), 1))
        outgoing = self.table.apply(step.plan, step.arrived, grads, 1.0, 1)
        slots = self.table.unplanned(np.arange(NUM_IDS))[0].slots.tolist()
        left = {id_: self.copies.pop(id_) for id_ in [*self.copies] if slots[id_] < 0}
        for id_ in ids[step.plan.entering].tolist():
            self.copies[id_] = Copy(self.clock(id_), self.num_own[id_], self.num_others[id_])
        assert {id_ for id_ in range(NUM_IDS) if slots[id_] >= 0} == self.copies.keys()
        gradients, changes = set(listed) - self.copies.keys(), {}
        for id_ in listed:
            self.num_own[id_] += 1
            if (copy := self.copies.get(id_)) is not None:
                copy.own, copy.held = copy.own + 1, copy.held + 1
                if copy.held > self.max_held(copy.clock or 0):
                    if copy.held == 1:
                        gradients.add(id_)
                    else:
                        changes[id_] = copy.held
        assert set(ids[outgoing.as_gradients].tolist()) == gradients
        changes.update({id_: copy.held for id_, copy in left.items() if copy.held})
        sent = self.sent(outgoing)
        unused = {id_: count for id_, count in sent.items() if id_ not in changes}
        assert {id_: count for id_, count in sent.items() if id_ in changes} == changes
        assert all(id_ not in listed and self.copies[id_].held == count for id_, count in unused.items())
        self.cached.receive(ids, grads, outgoing)
        self.table.sent(outgoing)
        self.settle(gradients | sent.keys())

    def sent(self, outgoing: Any) -> dict[int, int]:
        """Returns the number of updates in the changes of a push, by id."""
        sent: dict[int, int] = {}
        for changes in outgoing.changes:
            for id_, row, amount in zip(changes.ids.tolist(), changes.rows.tolist(), changes.amounts, strict=True):
                assert id_ not in sent
                assert row == [amount, 0]
                sent[id_] = int(amount)
        return sent

    def settle(self, ids: Any) -> None:
        """Takes note that what is held of rows was sent."""
        for id_ in ids:
            if (copy := self.copies.get(id_)) is not None:
                copy.clock, copy.held = None if copy.clock is None else copy.clock + copy.held, 0

    def flush(self) -> None:
        outgoing = self.table.flush()
        sent = self.sent(outgoing)
        assert sent == {id_: copy.held for id_, copy in self.copies.items() if copy.held}
        self.cached.receive(np.empty(0, np.int64), np.empty((0, DIM), np.float32), outgoing)
        self.table.sent(outgoing)
        self.settle(sent)
        assert self.cached.rows.tolist() == [list(each) for each in zip(self.num_own, self.num_others, strict=True)]

    def forget_versions(self) -> None:
        self.table.forget_versions()
        for copy in self.copies.values():
            copy.clock = None

    def evaluate(self) -> None:
        rows = self.cached.rows.copy()
        self.table.add_held(np.arange(NUM_IDS), rows)
        assert rows[:, 0].tolist() == self.num_own


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), IDS),
        st.tuples(st.just("step"), IDS),
        st.tuples(st.just("others"), st.tuples(st.integers(0, NUM_IDS - 1), st.integers(1, 20)).map(list)),
        st.tuples(st.sampled_from(["flush", "forget versions", "evaluate"]), st.just([])),
    ),
    max_size=60,
)


@pytest.mark.guarantee("H3")
@settings(max_examples=150, deadline=None)
@given(
    st.builds(RowBound, st.integers(1, 30), st.none() | st.sampled_from([0.25, 0.5, 1.0])),
    st.integers(2, 4),
    st.integers(1, NUM_IDS),
    st.sampled_from([ALL, SECOND, ESTIMATE]),
    ACTIONS,
)
def test_a_cache_asks_reads_and_sends_what_the_model_does(
    bound: RowBound, num_workers: int, capacity: int, admission: Any, actions: list[tuple[str, list[int]]]
) -> None:
    model = Model(bound, num_workers, capacity, admission)
    for action, ids in actions:
        if action == "step":
            model.update(model.read(ids))
        elif action == "others":
            model.made_by_others(*ids)
        elif action == "flush":
            model.flush()
        elif action == "forget versions":
            model.forget_versions()
        else:
            model.evaluate()
    model.flush()
