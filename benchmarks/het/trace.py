"""Traces: which distinct ids the batches of a click model with Criteo's field sizes have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.baselines import zipf
from fleet_sparse.core.jit import INT32_IN, INT32S, INT64, kernel
from fleet_sparse.models.synthetic import moved

_AT_ONCE = 64


class Trace(NamedTuple):
    """Distinct ids of the batches of a worker, numbered through over all fields."""

    ids: NDArray[np.int32]
    """Those of all batches, one after the other, each batch in the order of their first appearance."""
    begins: NDArray[np.int64]
    """`(num_steps + 1,)`: where each batch begins."""
    num_ids: int
    """All ids are smaller."""

    @property
    def num_steps(self) -> int:
        """Number of batches."""
        return len(self.begins) - 1

    def batch(self, step: int) -> NDArray[np.int32]:
        """Returns the distinct ids of a batch."""
        return self.ids[self.begins[step] : self.begins[step + 1]]


def draw(
    sizes: Sequence[int] | NDArray[np.int64],
    *,
    exponent: float,
    batch: int,
    num_steps: int,
    seed: int,
    moved_at: int | None = None,
) -> Trace:
    """Draws a value of each field for each example, by Zipf's law.

    Args:
        sizes: Number of values of each field.
        exponent: Exponent of Zipf's law.
        batch: Examples of a batch.
        num_steps: Number of batches.
        seed: Seed.
        moved_at: Step from which on other values are the frequent ones; None for no such step.
    """
    samplers = [zipf.sampler(int(size), exponent) for size in sizes]
    firsts = np.concatenate([[0], np.cumsum(sizes)])
    num_ids = int(firsts[-1])
    rng = np.random.default_rng([seed, 0])
    found, begins = [], [0]
    last_seen, out = np.full(num_ids, -1, np.int32), np.empty(batch * len(sizes), np.int32)
    for step in range(num_steps):
        if step % _AT_ONCE == 0:
            drawn = np.stack([sample(rng, (_AT_ONCE, batch)) for sample in samplers], axis=2)
        ids = drawn[step % _AT_ONCE]
        if moved_at is not None and step >= moved_at:
            ids = moved(ids, np.asarray(sizes, np.int64), seed)
        num_distinct = _distinct((ids + firsts[:-1]).astype(np.int32).reshape(-1), step, last_seen, out)
        found.append(out[:num_distinct].copy())
        begins.append(begins[-1] + num_distinct)
    return Trace(np.concatenate(found), np.array(begins, np.int64), num_ids)


@kernel(INT32_IN, INT64, INT32S, INT32S, result=INT64)
def _distinct(ids: NDArray[np.int32], step: int, last_seen: NDArray[np.int32], out: NDArray[np.int32]) -> int:
    """Writes the distinct ids of a step and returns their number; `last_seen` has the last step of each id."""
    num_distinct = 0
    for i in range(ids.shape[0]):
        if last_seen[ids[i]] != step:
            last_seen[ids[i]] = step
            out[num_distinct] = ids[i]
            num_distinct += 1
    return num_distinct
