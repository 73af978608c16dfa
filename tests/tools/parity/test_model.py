from __future__ import annotations

import numpy as np
import pytest

from fleet_sparse.tools.parity.model import CLICKS, DYADIC, MODELS

LARGEST_JOB = {"clicks": 16, "dyadic": 6}


def sizes(model, num_workers, num_steps=1):
    """Sizes of the sub-batches, one row per step."""
    return [[len(next(iter(share.values()))) for share in shares] for shares in model.steps(num_steps, num_workers)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_workers", [2, 3, 5])
def test_the_workers_of_a_step_share_the_batch_of_one(name, num_workers):
    model = MODELS[name]
    for (whole,), shares in zip(model.steps(3, 1), model.steps(3, num_workers), strict=True):
        for each, values in whole.items():
            np.testing.assert_array_equal(np.concatenate([share[each] for share in shares]), values)


@pytest.mark.parametrize("name", MODELS)
def test_every_worker_has_examples_in_every_step(name):
    assert np.min(sizes(MODELS[name], LARGEST_JOB[name], num_steps=20)) > 0


@pytest.mark.parametrize(("model", "inputs"), [(CLICKS, ["items", "users"]), (DYADIC, ["ids"])])
def test_every_step_touches_every_row(model, inputs):
    for (batch,) in model.steps(5, 1):
        for name in inputs:
            assert np.unique(batch[name]).tolist() == list(range(model.num_ids))


def test_workers_take_turns_at_shares_of_different_sizes():
    assert sizes(CLICKS, 3, num_steps=4) == [[42, 86, 128], [128, 42, 86], [85, 128, 43], [42, 86, 128]]


def test_shares_of_the_dyadic_model_are_powers_of_two():
    assert sizes(DYADIC, 4, num_steps=2) == [[16, 8, 4, 4], [4, 16, 8, 4]]
