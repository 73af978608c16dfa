from __future__ import annotations

import pytest

from benchmarks import parts
from benchmarks.parts import Timer

STEP = [
    Timer(parts.DISTINCT, 12, 13),
    Timer(parts.PULL, 13, 15),
    Timer(parts.PREFETCH, 11, 16),
    Timer(parts.PUSH, 20, 23),
    Timer(parts.UPDATE, 19, 24),
    Timer(parts.RUN, 10, 26),
]


def test_the_parts_of_a_step_add_up_to_it() -> None:
    (took,) = parts.parts_of(STEP, [16.5])
    assert took == {
        parts.LOADER: 0.5,
        parts.BEFORE: 1,
        parts.DISTINCT: 1,
        parts.PULL: 2,
        parts.REST_OF_PREFETCH: 2,
        parts.COMPUTED: 3,
        parts.PUSH: 3,
        parts.REST_OF_UPDATE: 2,
        parts.AFTER: 2,
    }
    assert sum(took.values()) == 16.5


def test_what_happens_outside_a_run_is_the_loaders() -> None:
    ahead = [Timer(parts.PULL, 5, 9), *STEP]
    (took,) = parts.parts_of(ahead, [21])
    assert took[parts.LOADER] == 5
    assert took[parts.PULL] == 2


def test_a_run_without_the_ops_has_no_parts() -> None:
    assert parts.parts_of([Timer(parts.RUN, 0, 1), *STEP], [1, 16]) == parts.parts_of(STEP, [16])


def test_each_run_is_of_a_step() -> None:
    with pytest.raises(ValueError, match="shorter"):
        parts.parts_of(STEP, [])
