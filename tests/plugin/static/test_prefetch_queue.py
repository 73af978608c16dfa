from __future__ import annotations

import gc
from typing import Any

import numpy as np

from fleet_sparse.plugin.static.prefetch_queue import ExpectedBatch, PrefetchQueue
from fleet_sparse.transpiler.plan import RewritePlan


def a_plan() -> RewritePlan:
    return RewritePlan((), (), ())


def batch(*ids: int, site: int = 0) -> ExpectedBatch:
    return ExpectedBatch({site: np.array(ids)}, {})


def inputs(*ids: int) -> list[np.ndarray[Any, Any]]:
    """Returns the ids of two sites; those of the second are computed in the graph."""
    return [np.array(ids), np.array([77])]


def test_nothing_is_expected_at_first():
    assert PrefetchQueue().take(a_plan(), inputs(1)) == (None, None)


def test_the_batch_that_comes_is_known_with_the_one_after_it():
    queue, plan, (first, second, third) = PrefetchQueue(), a_plan(), (batch(1), batch(2), batch(3))
    queue.expect(plan, first)
    queue.expect(plan, second)
    assert queue.take(plan, inputs(1)) == (first, second)
    queue.expect(plan, third)
    assert queue.take(plan, inputs(2)) == (second, third)
    assert queue.take(plan, inputs(3)) == (third, None)
    assert queue.take(plan, inputs(3)) == (None, None)


def test_batch_is_recognized_by_ids_of_any_shape_and_dtype():
    queue, plan, expected = PrefetchQueue(), a_plan(), batch(1, 2, 3, 4)
    queue.expect(plan, expected)
    assert queue.take(plan, [np.array([[1, 2], [3, 4]], np.int32), np.array([0])]) == (expected, None)


def test_other_ids_are_another_batch():
    for ids in ((1, 2), (1,), (1, 2, 4), (1, 2, 3, 3), ()):
        queue, plan = PrefetchQueue(), a_plan()
        queue.expect(plan, batch(1, 2, 3))
        assert queue.take(plan, inputs(*ids)) == (None, None)


def test_a_batch_of_which_one_site_differs_is_another_one():
    queue, plan = PrefetchQueue(), a_plan()
    queue.expect(plan, ExpectedBatch({0: np.array([1]), 1: np.array([2])}, {}))
    assert queue.take(plan, [np.array([1]), np.array([3])]) == (None, None)


def test_a_batch_that_was_not_expected_leaves_what_is():
    queue, plan, (first, second) = PrefetchQueue(), a_plan(), (batch(1), batch(2))
    queue.expect(plan, first)
    queue.expect(plan, second)
    assert queue.take(plan, inputs(9)) == (None, None)
    assert queue.take(plan, inputs(1)) == (first, second)


def test_a_batch_that_is_skipped_is_expected_no_more():
    queue, plan, (first, second) = PrefetchQueue(), a_plan(), (batch(1), batch(2))
    queue.expect(plan, first)
    queue.expect(plan, second)
    assert queue.take(plan, inputs(2)) == (second, None)
    assert queue.take(plan, inputs(1)) == (None, None)


def test_no_more_than_two_batches_are_kept():
    queue, plan, batches = PrefetchQueue(), a_plan(), [batch(1), batch(2), batch(3)]
    for expected in batches:
        queue.expect(plan, expected)
    assert queue.take(plan, inputs(1)) == (None, None)
    assert queue.take(plan, inputs(2)) == (batches[1], batches[2])


def test_each_plan_has_its_own():
    queue, (plan, other), expected = PrefetchQueue(), (a_plan(), a_plan()), batch(1)
    queue.expect(plan, expected)
    assert queue.take(other, inputs(1)) == (None, None)
    assert queue.take(plan, inputs(1)) == (expected, None)


def test_plan_at_the_address_of_a_deleted_one_has_no_batches():
    """If the queue kept no reference, later plans could have the same id()."""
    queue = PrefetchQueue()
    for _ in range(100):
        plan = a_plan()
        assert queue.take(plan, inputs(1)) == (None, None)
        queue.expect(plan, batch(1))
        del plan
        gc.collect(0)


def test_batches_that_are_forgotten_are_expected_no_more():
    queue, plan, (first, second) = PrefetchQueue(), a_plan(), (batch(1), batch(2))
    queue.expect(plan, first)
    queue.expect(plan, second)
    queue.forget(plan, [second, batch(3)])
    assert queue.take(plan, inputs(2)) == (None, None)
    assert queue.take(plan, inputs(1)) == (first, None)
