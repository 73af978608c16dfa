"""Dense values of a job of one worker that the pservers train, as with a rule that Paddle does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from fleet_sparse.core.dense_spec import DenseSpec, Segment
from fleet_sparse.core.mode import ASYNC, SYNC, Mode
from fleet_sparse.errors import FleetSparseError, PushRefused
from fleet_sparse.worker.modes.dense_values import write_values
from fleet_sparse.worker.modes.sync_async import PserverTraining
from fleet_sparse.worker.net.client import Client
from fleet_sparse.worker.net.requests import DenseUpdate
from fleet_sparse.worker.rows.deduplicator import Deduplicator
from fleet_sparse.worker.rows.row_batch import RowBatch
from support.in_process import InProcessCluster

NUM_VALUES = 1000
SEGMENTS = (
    Segment("w", 0, 601, 1.0, 0.0, 0.25),
    Segment("b", 601, 399, 2.0, clip_min=-0.5, clip_max=0.5),
)
MODES = [Mode(ASYNC), Mode(SYNC)]
both_modes = pytest.mark.parametrize("mode", MODES, ids=["async", "sync"])


def dense_of(rule: str = "adam") -> DenseSpec:
    return DenseSpec("trained", rule, (), SEGMENTS)


class Worker:
    """The only worker of a job that trains one dense array, besides rows of `cluster.table`."""

    def __init__(self, cluster: InProcessCluster, spec: DenseSpec, mode: Mode) -> None:
        self.client: Client = cluster.worker(0, 1, mode)
        self._cluster, self._spec = cluster, spec
        self.training = PserverTraining(self.client, Deduplicator(cluster.placement), mode, 1)
        self.training.note_states(cluster.shards[0].states())
        self._rng = np.random.default_rng(1)

    def update(self, grads: NDArray[np.float32] | None = None, rows_grad: float = 1.0) -> NDArray[np.float32]:
        """A step; the values after it."""
        if grads is None:
            grads = self._rng.standard_normal(NUM_VALUES).astype(np.float32)
        out = np.empty((NUM_VALUES // 10, 10), np.float32)
        unique, _ = Deduplicator(self._cluster.placement).unique([np.arange(20)], self._cluster.table.salt)
        rows = RowBatch(self._cluster.table, unique, np.full((20, 4), rows_grad, np.float32), 0.1)
        self.training.update([rows], [DenseUpdate(self._spec, grads, [out], 0.05)], 1.0)
        return out.reshape(-1)

    def on_pservers(self) -> NDArray[np.float32]:
        """What they have now."""
        out = np.empty(NUM_VALUES, np.float32)
        self.client.pull_dense(self._spec, out)
        return out


Open = Callable[..., tuple[InProcessCluster, Worker]]


@pytest.fixture
def open_job() -> Iterator[Open]:
    """Pservers with a dense array of a rule that has its first values, and its worker."""
    clusters: list[InProcessCluster] = []

    def opened(rule: str = "adam", mode: Mode = MODES[0], num_shards: int = 3) -> tuple[InProcessCluster, Worker]:
        spec = dense_of(rule)
        clusters.append(InProcessCluster(num_shards, [spec]))
        worker = Worker(clusters[-1], spec, mode)
        worker.client.assign_dense(spec, np.linspace(-1, 1, NUM_VALUES, dtype=np.float32))
        return clusters[-1], worker

    yield opened
    for cluster in clusters:
        cluster.close()


def assert_same_bits(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> None:
    np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))


@both_modes
@pytest.mark.parametrize("bad", ["dense", "rows"])
@pytest.mark.guarantee("D6")
def test_gradients_that_are_not_finite_are_not_sent(open_job: Open, mode: Mode, bad: str) -> None:
    _, worker = open_job("adam", mode)
    before = worker.update()
    worker.client.flush()  # and so it is counted
    sent = worker.client.num_pushed_rows
    wrong = np.full(NUM_VALUES, np.nan, np.float32)
    with pytest.raises(PushRefused, match=f"{'dense' if bad == 'dense' else 'table'} '.*NaN or infinite"):
        worker.update(*((wrong,) if bad == "dense" else (None, np.inf)))
    assert worker.client.num_pushed_rows == sent
    assert_same_bits(worker.on_pservers(), before)
    assert_same_bits(worker.update(), worker.on_pservers())


@pytest.mark.parametrize(
    ("out", "fault"),
    [
        (np.empty(10, np.float32), "out has 10 values, should have 1000"),
        (np.empty(NUM_VALUES, np.float64), "out is float64"),
        (np.empty((10, 100), np.float32).T, "should be writable contiguous"),
    ],
)
def test_nothing_is_sent_if_values_do_not_fit_their_arrays(
    open_job: Open, out: NDArray[np.float32], fault: str
) -> None:
    _, worker = open_job("sgd")
    before = worker.update()
    with pytest.raises(ValueError, match=fault):
        worker.training.update([], [DenseUpdate(dense_of("sgd"), np.ones(NUM_VALUES, np.float32), [out], 0.1)], 1.0)
    assert_same_bits(worker.on_pservers(), before)


def test_infinite_learning_rate_of_a_parameter_is_refused(open_job: Open) -> None:
    _, worker = open_job("sgd")
    before = worker.update()
    update = DenseUpdate(dense_of("sgd"), np.ones(NUM_VALUES, np.float32), [np.empty_like(before)], 2e38)
    with pytest.raises(PushRefused, match="dense 'trained': learning rate is 4e\\+38, it should be finite"):
        worker.training.update([], [update], 1.0)
    assert_same_bits(worker.on_pservers(), before)


@both_modes
def test_a_step_that_was_not_sent_does_not_count(open_job: Open, mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise FleetSparseError("an earlier push failed")

    _, worker = open_job("adam", mode)
    worker.update()
    with monkeypatch.context() as patch:
        patch.setattr(worker.client, "start_update", fails)
        with pytest.raises(FleetSparseError):
            worker.update()
    assert_same_bits(worker.update(), worker.on_pservers())


def test_more_shards_than_values_leave_some_without() -> None:
    spec = DenseSpec("small", "adagrad", (), (Segment("w", 0, 2, 1.0),))
    cluster = InProcessCluster(3, [spec])
    client = cluster.worker(0, 1, MODES[0])
    client.assign_dense(spec, np.zeros(2, np.float32))
    training = PserverTraining(client, Deduplicator(cluster.placement), MODES[0], 1)
    out, there = np.empty(2, np.float32), np.empty(2, np.float32)
    training.update([], [DenseUpdate(spec, np.ones(2, np.float32), [out], 0.5)], 1.0)
    client.pull_dense(spec, there)
    assert_same_bits(out, there)
    cluster.close()


@pytest.mark.parametrize("shapes", [[(10,)], [(2, 3), (4,)], [(1,), (0,), (3, 3)]])
@pytest.mark.parametrize("cuts", [[10], [3, 7, 10], [1, 6, 6, 10]])
def test_values_go_into_arrays_of_any_shape_one_after_the_other(
    shapes: Sequence[tuple[int, ...]], cuts: Sequence[int]
) -> None:
    outs, values = [np.full(shape, -1, np.float32) for shape in shapes], np.arange(10, dtype=np.float32)
    for begin, end in zip([0, *cuts], cuts, strict=False):
        write_values(values[begin:end], begin, outs)
    assert np.concatenate([out.reshape(-1) for out in outs]).tolist() == values.tolist()
