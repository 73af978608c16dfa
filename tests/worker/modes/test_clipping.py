"""Training with a clip by norm, real clients over shards in process: the norm is that of the step of all workers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from fleet_sparse.core.clip import BY_GLOBAL_NORM, BY_NORM, Clip
from fleet_sparse.core.mode import ASYNC, AVG, SUM, SYNC, Mode
from fleet_sparse.errors import FleetSparseError, PushRefused
from fleet_sparse.settings import Settings
from fleet_sparse.worker.modes.step import StepClip
from fleet_sparse.worker.modes.sync_async import PserverTraining
from fleet_sparse.worker.net.client import Pending
from fleet_sparse.worker.net.requests import DenseUpdate
from fleet_sparse.worker.rows.deduplicator import Deduplicator
from fleet_sparse.worker.rows.early_rows import EarlyRows
from fleet_sparse.worker.rows.row_batch import RowBatch
from support.in_process import QUICK, EmbeddedCluster, InProcessCluster
from support.successive import Lookup, SuccessiveLookups
from support.threads import in_threads

NUM_STEPS, NUM_IDS, RATE = 12, 20, 0.25
AVG_MODE, SUM_MODE = Mode(SYNC, AVG), Mode(SYNC, SUM)

# What is trained: two tables of the cluster, and its dense array, whose first segment lies on two of three shards.
TABLES = {"table": 4, "other": 3}
FIRST_ROW = {"table": 1.0, "other": 2.0}
SEGMENTS = {"a": (slice(0, 7), 1.0), "b": (slice(7, 10), 2.0)}  # with the factor on the learning rate
NUM_DENSE = 10

NORM, GLOBAL = Clip(BY_NORM, norm=0.75), Clip(BY_GLOBAL_NORM, norm=1.5)
ALL, SOME = (True, True, True, True), (True, False, True, False)
every_clip = pytest.mark.parametrize(
    "clip",
    [StepClip(NORM, ALL), StepClip(GLOBAL, ALL), StepClip(NORM, SOME), StepClip(GLOBAL, SOME)],
    ids=["norm", "global norm", "norm of some", "global norm of some"],
)
BOTH = pytest.mark.parametrize("clip", [StepClip(NORM, ALL), StepClip(GLOBAL, SOME)], ids=["norm", "global norm"])


class Share(NamedTuple):
    """What one worker trains in a step: rows and dense values are drawn to targets."""

    ids: dict[str, NDArray[np.int64]]
    targets: dict[str, float]
    dense_target: float
    num_examples: int


def shares(num_workers: int, num_steps: int = NUM_STEPS) -> list[list[Share]]:
    """By step and worker; one in four has no ids of the second table."""
    rng = np.random.default_rng(3)

    def ids() -> NDArray[np.int64]:
        return rng.choice(NUM_IDS, size=rng.integers(1, NUM_IDS), replace=False).astype(np.int64)

    return [
        [
            Share(
                {"table": ids(), "other": ids()[: NUM_IDS * int(rng.random() < 0.75)]},
                {name: float(rng.normal()) for name in TABLES},
                float(rng.normal()),
                int(rng.integers(1, 64)),
            )
            for _ in range(num_workers)
        ]
        for _ in range(num_steps)
    ]


Steps = Sequence[Sequence[Share | None]]
"""For each step the share of each worker; None for one that has none left."""


class Trained(NamedTuple):
    """What came of it: losses `(num_steps, num_workers)`, NaN without a share; all rows, and the dense values."""

    losses: NDArray[np.float64]
    rows: dict[str, NDArray[Any]]
    dense: NDArray[Any]

    def bits(self) -> list[bytes]:
        return [values.tobytes() for values in (self.losses, *self.rows.values(), self.dense)]


def assert_close(one: Trained, other: Trained) -> None:
    np.testing.assert_allclose(one.losses, other.losses, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(one.dense, other.dense, rtol=0, atol=1e-6)
    for name in TABLES:
        np.testing.assert_allclose(one.rows[name], other.rows[name], rtol=0, atol=1e-6)


def loss_of(rows: dict[str, NDArray[Any]], dense: NDArray[Any], share: Share) -> float:
    far = [np.float64(values) - share.targets[name] for name, values in rows.items()]
    return float(sum(np.sum(distance**2) for distance in [*far, np.float64(dense) - share.dense_target]) / 2)


# In NumPy


def train_in_numpy(steps: Steps, clip: StepClip | None, scale: str = AVG) -> Trained:
    """The same in float64, by one process that merges the shares of a step and clips what they come to."""
    rows = {name: np.full((NUM_IDS, dim), FIRST_ROW[name]) for name, dim in TABLES.items()}
    dense, losses = np.zeros(NUM_DENSE), []
    for of_step in steps:
        there = [share for share in of_step if share is not None]
        losses.append(
            [
                np.nan if s is None else loss_of({name: rows[name][s.ids[name]] for name in TABLES}, dense, s)
                for s in of_step
            ]
        )
        sizes = np.array([share.num_examples for share in there], np.float64)
        weights = sizes / sizes.sum() if scale == AVG else np.ones(len(there))
        grads = {name: np.zeros_like(values) for name, values in rows.items()}
        of_dense = np.zeros(NUM_DENSE)
        for weight, share in zip(weights, there, strict=True):
            for name, ids in share.ids.items():
                grads[name][ids] += weight * (rows[name][ids] - share.targets[name])
            of_dense += weight * (dense - share.dense_target)
        parts = [*grads.values(), *(of_dense[segment] for segment, _ in SEGMENTS.values())]
        factors = np.ones(len(parts)) if clip is None else factors_of(clip, [np.sum(part**2) for part in parts])
        for name, factor in zip(TABLES, factors, strict=False):
            rows[name] -= RATE * factor * grads[name]
        for (segment, rate), factor in zip(SEGMENTS.values(), factors[len(TABLES) :], strict=True):
            dense[segment] -= RATE * rate * factor * of_dense[segment]
    return Trained(np.array(losses), rows, dense)


def factors_of(clip: StepClip, squares: Sequence[float]) -> NDArray[np.float64]:
    """As Paddle's documentation has it."""
    needs = np.array(clip.needs_clip)
    norms = np.sqrt(squares)
    if clip.clip.kind == BY_GLOBAL_NORM:
        norms = np.full(len(squares), np.sqrt(np.sum(np.square(norms[needs]))))
    return np.where(needs, np.minimum(1.0, clip.clip.norm / np.maximum(norms, 1e-30)), 1.0)


# On shards


class Worker:
    """One worker of a job, in this process."""

    def __init__(self, cluster: InProcessCluster, index: int, num_workers: int, mode: Mode, settings: Settings) -> None:
        self.index = index
        self.client = cluster.worker(index, num_workers, mode, settings)
        self.channel = cluster.channel
        self._dense_spec = cluster.dense
        deduplicator = Deduplicator(cluster.placement)
        self._lookups = SuccessiveLookups(deduplicator, (cluster.table, cluster.other))
        self.training = PserverTraining(self.client, deduplicator, mode, num_workers)
        self.dense = np.zeros(NUM_DENSE, np.float32)

    def step(self, share: Share, clip: StepClip | None, before: EarlyRows | None, coming: EarlyRows | None) -> float:
        """The loss before the step."""
        lookups = self._lookups.of(share.ids, before)
        batches = [lookup.rows for lookup in lookups.values()]
        self.training.prefetch(batches, before, coming)
        loss = loss_of(in_order(lookups), self.dense, share)
        updates = [
            RowBatch(spec, unique, out - np.float32(share.targets[spec.name]), RATE)
            for spec, unique, out, *_ in batches
        ]
        values = np.empty_like(self.dense)
        dense = [DenseUpdate(self._dense_spec, self.dense - np.float32(share.dense_target), [values], RATE)]
        self.training.update(updates, dense, share.num_examples, clip)
        self.dense = values
        return loss

    def ahead(self, share: Share, before: Share) -> EarlyRows:
        """A share that is to come after another one."""
        return self._lookups.announce(share.ids, before.ids)

    def rows(self) -> dict[str, NDArray[np.float32]]:
        """All of them, by id."""
        lookups = self._lookups.of(dict.fromkeys(TABLES, np.arange(NUM_IDS)))
        self.training.pull([lookup.rows for lookup in lookups.values()])
        return in_order(lookups)

    def pulled_dense(self) -> NDArray[np.float32]:
        self.training.pull_dense(self._dense_spec, self.dense)
        return self.dense


def in_order(lookups: Mapping[str, Lookup]) -> dict[str, NDArray[np.float32]]:
    """Rows in the order of the ids of the batch, by table."""
    return {name: lookup.rows.values[lookup.inverse] for name, lookup in lookups.items()}


class Job:
    """Shards and the workers that train on them."""

    def __init__(
        self,
        num_shards: int,
        num_workers: int,
        mode: Mode,
        settings: Settings,
        cluster_of: type[InProcessCluster] = InProcessCluster,
    ) -> None:
        self.cluster = cluster_of(num_shards)
        self.workers = [Worker(self.cluster, index, num_workers, mode, settings) for index in range(num_workers)]
        self.workers[0].client.assign_dense(self.cluster.dense, self.workers[0].dense)

    def in_threads(self, work: Callable[[Worker], Any]) -> list[Any]:
        """What `work` returns for each worker."""
        return in_threads(*(lambda worker=worker: work(worker) for worker in self.workers))

    def train(self, steps: Steps, clip: StepClip | None, *, looks_ahead: bool = False) -> Trained:
        def work(worker: Worker) -> list[float]:
            losses, mine = [], [of_step[worker.index] for of_step in steps]
            before = None
            for share, following in zip(mine, [*mine[1:], None], strict=True):
                coming = None
                if looks_ahead and share is not None and following is not None:
                    coming = worker.ahead(following, share)
                losses.append(np.nan if share is None else worker.step(share, clip, before, coming))
                before = coming
            worker.training.drain(leaves=True)
            return losses

        losses = self.in_threads(work)
        return Trained(np.array(losses).T, self.workers[-1].rows(), self.workers[0].pulled_dense())


Jobs = Callable[..., Job]


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    """`jobs(num_shards, num_workers)`: a job."""
    made: list[Job] = []

    def make(
        num_shards: int,
        num_workers: int,
        mode: Mode = AVG_MODE,
        cluster_of: type[InProcessCluster] = InProcessCluster,
        **changed: Any,
    ) -> Job:
        made.append(Job(num_shards, num_workers, mode, replace(QUICK, **changed), cluster_of))
        return made[-1]

    yield make
    for job in made:
        job.cluster.close()


@every_clip
@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("num_shards", [1, 2, 3])
@pytest.mark.guarantee("C3")
def test_training_equals_one_process_in_float64(jobs: Jobs, num_shards: int, num_workers: int, clip: StepClip) -> None:
    steps = shares(num_workers)
    expected = train_in_numpy(steps, clip)
    assert_close(jobs(num_shards, num_workers).train(steps, clip), expected)
    assert np.abs(train_in_numpy(steps, None).losses - expected.losses).max() > 0.1


@BOTH
def test_shares_that_are_summed_are_clipped_as_their_sum(jobs: Jobs, clip: StepClip) -> None:
    steps = shares(3)
    assert_close(jobs(2, 3, SUM_MODE).train(steps, clip), train_in_numpy(steps, clip, SUM))


@BOTH
def test_workers_without_a_share_count_for_nothing(jobs: Jobs, clip: StepClip) -> None:
    steps = [
        [share if step < last else None for share, last in zip(of_step, (5, 12, 8), strict=True)]
        for step, of_step in enumerate(shares(3))
    ]
    assert_close(jobs(2, 3).train(steps, clip), train_in_numpy(steps, clip))


@pytest.mark.parametrize("kind", [BY_NORM, BY_GLOBAL_NORM])
def test_norm_that_no_step_exceeds_changes_no_bit(jobs: Jobs, kind: str) -> None:
    clipped = jobs(2, 3).train(shares(3), StepClip(Clip(kind, norm=1e6), ALL))
    assert clipped.bits() == jobs(2, 3).train(shares(3), None).bits()


@BOTH
@pytest.mark.parametrize("num_workers", [1, 3])
def test_looking_ahead_changes_no_bit(jobs: Jobs, num_workers: int, clip: StepClip) -> None:
    steps = shares(num_workers)
    plain = jobs(2, num_workers).train(steps, clip)
    assert jobs(2, num_workers).train(steps, clip, looks_ahead=True).bits() == plain.bits()


@BOTH
@pytest.mark.parametrize("looks_ahead", [False, True])
def test_both_phases_without_frames_change_no_bit(jobs: Jobs, clip: StepClip, looks_ahead: bool) -> None:
    steps = shares(3)
    called = jobs(2, 3, cluster_of=EmbeddedCluster).train(steps, clip, looks_ahead=looks_ahead)
    assert called.bits() == jobs(2, 3).train(steps, clip).bits()


@pytest.mark.parametrize("limits", [{"max_frame_bytes": 512}, {}], ids=["split", "whole"])
def test_steps_larger_than_the_window_change_no_bit(jobs: Jobs, limits: dict[str, int]) -> None:
    """The first round is out of the window before the second needs room in it."""
    steps, clip = shares(3), StepClip(GLOBAL, ALL)
    small = jobs(2, 3, max_inflight_pushes=1, max_inflight_bytes=64, **limits)
    assert small.train(steps, clip).bits() == jobs(2, 3).train(steps, clip).bits()


class RecordingClip:
    """`GLOBAL`, and the norms that it was asked about."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []

    def factors(self, squared_norms: NDArray[np.float64], needs_clip: Sequence[bool]) -> NDArray[np.float32]:
        self.seen.append(squared_norms.tobytes())
        return GLOBAL.factors(squared_norms, needs_clip)


def test_norms_do_not_depend_on_the_order_of_answers(jobs: Jobs) -> None:
    job, steps = jobs(3, 2, retry_s=0.02, deadline_s=2.0), shares(2)
    count = iter(range(10**6))
    job.workers[0].channel.loses_reply = lambda shard: shard == 0 and next(count) % 2 == 0
    clips: Any = [RecordingClip() for _ in job.workers]

    def work(worker: Worker) -> None:
        for of_step in steps:
            worker.step(of_step[worker.index], StepClip(clips[worker.index], ALL), None, None)

    job.in_threads(work)
    assert clips[0].seen == clips[1].seen
    assert len(clips[0].seen) == NUM_STEPS


def test_in_async_each_push_has_its_own_norm(jobs: Jobs) -> None:
    job, clip = jobs(2, 2, Mode(ASYNC)), StepClip(Clip(BY_GLOBAL_NORM, norm=RATE), ALL)
    share = shares(1, 1)[0][0]
    losses = []
    for worker in job.workers:
        worker.pulled_dense()
        losses.append([worker.step(share, clip, None, None)])
    trained = Trained(np.array(losses), job.workers[0].rows(), job.workers[1].dense)
    assert_close(trained, train_in_numpy([[share], [share]], clip))


# Steps that cannot be


def error_of(call: Callable[[], Any]) -> FleetSparseError | None:
    try:
        call()
    except FleetSparseError as error:
        return error
    return None


def test_share_that_one_shard_refuses_ends_all_training(jobs: Jobs) -> None:
    """The other shard has measured the step, and nobody applies it; nobody waits for that either."""
    job = jobs(2, 3)
    share = shares(1, 1)[0][0]

    def work(worker: Worker) -> list[FleetSparseError | None]:
        if worker.index == 1:
            worker.dense[0] = np.nan  # so will be its gradient, on shard 0
        step = error_of(lambda: worker.step(share, StepClip(GLOBAL, ALL), None, None))
        return [step, error_of(partial(worker.training.drain, leaves=True)), error_of(worker.client.close)]

    for step, rest, close in job.in_threads(work):
        assert isinstance(step, PushRefused)
        assert isinstance(rest, PushRefused)
        assert "dense 'dense': 1 of" in str(step)
        assert close is None


@pytest.mark.parametrize(
    "other", [None, StepClip(NORM, ALL), StepClip(GLOBAL, SOME), StepClip(GLOBAL._replace(norm=0.5), ALL)]
)
@pytest.mark.guarantee("C4")
def test_workers_that_do_not_clip_alike_are_told_so(jobs: Jobs, other: StepClip | None) -> None:
    job = jobs(2, 2)
    share = shares(1, 1)[0][0]
    clips = [StepClip(GLOBAL, ALL), other]
    errors = job.in_threads(lambda worker: error_of(lambda: worker.step(share, clips[worker.index], None, None)))
    assert all("should" in str(error) and "the same grad_clip" in str(error) for error in errors)


def test_ctrl_c_between_the_phases_does_not_divide_a_step(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    job = jobs(2, 2)
    first, second = job.workers
    steps, clip = [(shares(2)[0]), (shares(2)[1])], StepClip(GLOBAL, ALL)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    prepare = first.client.start_prepare

    def interrupted(*args: Any, **options: Any) -> Pending:
        pending = prepare(*args, **options)
        signal.raise_signal(signal.SIGINT)
        return pending

    other = threading.Thread(target=lambda: [second.step(of_step[1], clip, None, None) for of_step in steps])
    other.start()
    with monkeypatch.context() as patch:
        patch.setattr(first.client, "start_prepare", interrupted)
        with pytest.raises(KeyboardInterrupt):
            first.step(steps[0][0], clip, None, None)
    signal.signal(signal.SIGINT, before)
    first.pulled_dense()
    first.step(steps[1][0], clip, None, None)
    other.join(20)
    expected = jobs(2, 2).train(steps, clip)
    for name, rows in first.rows().items():
        assert rows.tobytes() == expected.rows[name].tobytes()
