"""Losses of a worker without Paddle: the same bits over every transport, on any number of shards, looking ahead or not.

The same with Paddle: `tests/e2e/test_equality.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from fleet_sparse.core.initializer import uniform
from fleet_sparse.core.kernels_batch import segment_sum
from fleet_sparse.core.mode import ASYNC, Mode
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.settings import Settings
from fleet_sparse.worker.modes.sync_async import PserverTraining
from fleet_sparse.worker.rows.deduplicator import Deduplicator, TableLookups
from fleet_sparse.worker.rows.early_rows import EarlyRows, SuccessiveBatch
from fleet_sparse.worker.rows.row_batch import RowBatch
from support.connections import TRANSPORTS, client_over

NUM_STEPS = 50
SIZES = (0, 1, 40, 7, 300, 40)
"""Numbers of ids of a lookup, in a cycle: those of 300 exceed a frame."""
SMALL_FRAMES = Settings(deadline_s=60.0, max_frame_bytes=2048, max_inflight_bytes=1 << 20)
PADDINGS = (0, None, -5)
"""Padding id of each lookup of a table."""
SPECS = (
    TableSpec(name="equal.adagrad", dim=5, rule="adagrad", initializer=uniform(-1.0, 1.0), seed=1),
    TableSpec(name="equal.adam", dim=2, rule="adam", initializer=uniform(-1.0, 1.0), seed=2),
    TableSpec(name="equal.sgd", dim=8, rule="sgd", initializer=uniform(-1.0, 1.0), seed=3),
)

Batch = dict[str, list[NDArray[np.int64]]]  # by table, of each lookup


def batches() -> Iterator[Batch]:
    rng = np.random.default_rng(5)
    for step in range(NUM_STEPS):
        batch = {}
        for number, spec in enumerate(SPECS):
            sizes = [SIZES[(step + number + lookup) % len(SIZES)] for lookup in range(len(PADDINGS))]
            # Some ids in every step, so that a step changes rows of the next one, and many that are new.
            batch[spec.name] = [
                np.where(rng.random(size) < 0.5, rng.integers(-9, 9, size), rng.integers(-(2**62), 2**62, size))
                for size in sizes
            ]
        yield batch


class Worker:
    """Trains tables on the sum of the squares of their rows, each weighted by its place in the batch."""

    def __init__(self, deduplicator: Deduplicator, training: PserverTraining) -> None:
        self._deduplicator = deduplicator
        self._training = training
        self._lookups = {spec.name: TableLookups(spec.name, np.uint64(spec.salt), PADDINGS) for spec in SPECS}
        self._sequences = {name: deduplicator.sequence(lookups) for name, lookups in self._lookups.items()}
        self._positions: dict[int, dict[str, list[NDArray[np.int64]]]] = {}

    def losses(self, *, looks_ahead: bool) -> list[bytes]:
        """Trains all batches; returns the bits of every loss."""
        losses, early, steps = [], None, [*batches(), None]
        positions = self._places_of(steps[0])
        for batch, following in pairwise(steps):
            assert batch is not None
            coming, coming_positions = None, self._places_of(following)
            if looks_ahead:
                early = early or self._announced(batch, positions)
                coming = None if following is None else self._announced(following, coming_positions)
            rows = list(early.batches.values()) if early else self._placed(batch, positions)
            self._training.prefetch(rows, early, coming)
            losses.append(self._update(rows, positions))
            early, positions = coming, coming_positions
            if len(losses) % 7 == 0:
                self._training.drain()  # as a barrier does: early rows are dropped
        self._training.drain()
        return losses

    def _announced(self, batch: Batch, positions: dict[str, list[NDArray[np.int64]]]) -> EarlyRows:
        lookups = []
        for spec in SPECS:
            ids = self._sequences[spec.name].place(batch[spec.name], positions[spec.name])
            lookups.append(SuccessiveBatch(RowBatch.empty(spec, ids.unique), ids))
        return EarlyRows(lookups)

    def _placed(self, batch: Batch, positions: dict[str, list[NDArray[np.int64]]]) -> list[RowBatch]:
        place = self._deduplicator.place
        return [
            RowBatch.empty(spec, place(self._lookups[spec.name], batch[spec.name], positions[spec.name]))
            for spec in SPECS
        ]

    @staticmethod
    def _places_of(batch: Batch | None) -> dict[str, list[NDArray[np.int64]]]:
        """Memory for the positions of a batch."""
        return {name: [np.empty_like(ids) for ids in lookups] for name, lookups in (batch or {}).items()}

    def _update(self, lookups: list[RowBatch], positions: dict[str, list[NDArray[np.int64]]]) -> bytes:
        loss, updates = np.float32(0), []
        for rows in lookups:
            places = np.concatenate(positions[rows.spec.name])
            padded = np.concatenate([rows.values, np.zeros((1, rows.spec.dim), np.float32)])
            of_ids = padded[places]
            weights = np.sin(np.arange(len(places), dtype=np.float32) + 1).reshape(-1, 1)
            loss += np.float32(np.sum(weights * of_ids * of_ids))
            grads = np.empty(padded.size, np.float32)
            segment_sum((2 * weights * of_ids).reshape(-1), places, rows.spec.dim, grads)
            updates.append(rows._replace(values=grads.reshape(padded.shape)[:-1], learning_rate=0.05))
        self._training.update(updates, [], 1.0)
        return loss.tobytes()


def losses_over(transport: str, num_shards: int, mode: Mode | None = None, *, looks_ahead: bool) -> list[bytes]:
    with client_over(transport, SPECS, SMALL_FRAMES, num_shards) as (client, placement):
        deduplicator = Deduplicator(placement)
        training = PserverTraining(client, deduplicator, mode or Mode(ASYNC), 1)
        return Worker(deduplicator, training).losses(looks_ahead=looks_ahead)


@cache
def plain_losses() -> list[bytes]:
    """Losses of the plain loop on one embedded shard."""
    return losses_over("embedded", 1, looks_ahead=False)


def shards(num_shards: int) -> object:
    """All tests run with one number of shards, the full grid with each."""
    return pytest.param(num_shards, marks=() if num_shards == 3 else pytest.mark.slow)


@pytest.mark.guarantee("L1")
@pytest.mark.parametrize("looks_ahead", [False, True], ids=["plain", "looking ahead"])
@pytest.mark.parametrize("num_shards", [*map(shards, range(1, 5))])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_losses_are_equal_bit_by_bit(transport: str, num_shards: int, looks_ahead: bool) -> None:
    assert losses_over(transport, num_shards, looks_ahead=looks_ahead) == plain_losses()


def test_losses_differ_from_step_to_step() -> None:
    assert len(set(plain_losses())) == NUM_STEPS
