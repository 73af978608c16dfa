"""PserverTraining: the steps of a worker whose gradients are applied on the pservers, in sync and async mode."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.mode import SYNC, Mode
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import FleetSparseError, PlanError
from fleet_sparse.wire.control import TableState

from ..net.client import Client, DensePush, Pending, RowsPush
from ..net.deferred_interrupt import DeferredInterrupt
from ..net.requests import check_outs
from ..rows.deduplicator import Deduplicator
from ..rows.look_ahead import EarlyRows
from .dense_replica import LocalDense, Replica
from .step import DenseUpdate, Lookup, Progress, QuiescePoint, RowsUpdate, StepClip, check_finite

logger = logging.getLogger(__name__)

_MAX_PASSED = 1000  # so many steps may be over before a save in sync training gets this worker's marks


class PserverTraining:
    """Implements `Training`: every gradient goes to the shards, which have the update rules.

    Args:
        client: Of this worker.
        deduplicator: Of the shards' placement.
        mode: Of the job; not geo.
        num_workers: Of the job. One that is alone computes new dense values by itself, as the pservers do, rather than
            wait for theirs.
        local_dense: Makes what it does so with. An array for which it finds no memory is waited for.
    """

    def __init__(
        self, client: Client, deduplicator: Deduplicator, mode: Mode, num_workers: int, local_dense: LocalDense
    ) -> None:
        self._client = client  # constant after construction, as all down to `_is_merged`
        self._deduplicator = deduplicator
        self._local_dense = local_dense
        self._counts_steps = mode.is_step_synchronized
        self._is_alone = num_workers == 1
        self._is_merged = mode.kind == SYNC and not self._is_alone  # with other workers' shares, on the shards
        self._stepping = threading.Lock()  # held from the number of a step to its push: they go out in order
        self._replicas: dict[str, Replica] = {}  # with `_stepping` held, as the next two
        self._without_replica: set[str] = set()
        self._num_failed_pushes = 0  # when the replicas were right
        self._lock = threading.Lock()  # guards all below
        self._rests = False  # or began to, and was interrupted
        self._step = 0  # that this worker pushed last
        self._complete = 0  # newest step that every shard is known to have completed; in sync
        self._ahead: EarlyRows | None = None  # of the step after the present one
        self._num_updates: dict[str, int] = {}  # by table, of this worker: Adam's t
        self._passed = deque([Progress(0, None)], maxlen=_MAX_PASSED)  # the last steps

    def note_states(self, states: Iterable[TableState]) -> None:
        """Goes on counting updates where the pservers' tables stand."""
        with self._lock:
            for state in states:
                self._num_updates[state.name] = max(self._num_updates.get(state.name, 0), state.optimizer_step)

    def pull(self, lookups: Sequence[Lookup]) -> None:
        """As `Training`."""
        step = self._next_step()
        self._client.pull(lookups, step=step)
        self._note_complete(step - 1)

    def prefetch(
        self, lookups: Sequence[Lookup], ahead: EarlyRows | None = None, coming: EarlyRows | None = None
    ) -> None:
        """As `Training`."""
        with self._lock:
            here = self._ahead if self._ahead is not None and self._ahead.is_complete else None
            # A run that nobody announced may be an evaluation; if it trains, its update makes what is here stale.
            keeps = here is not None and ahead is None and coming is None
            if not keeps:
                self._ahead = coming
            step = self._step_to_begin()
        if here is not None and here is ahead:
            lookups_left = here.finish(lookups)
            self._note_complete(self._next_step() - 1)
            if lookups_left:
                self.pull(lookups_left)
        else:
            if here is not None and not keeps:
                here.drop()
            self.pull(lookups)
        if coming is not None:
            coming.begin(self._client, self._deduplicator, lookups, step=step, merges=self._is_merged)

    def update(
        self,
        rows: Sequence[RowsUpdate],
        dense: Sequence[DenseUpdate],
        num_examples: float,
        clip: StepClip | None = None,
        position: str = "",
    ) -> None:
        """As `Training`; waits for the new dense values, if there are any and other workers change them too.

        Raises:
            PushRefused: This worker is alone and trains dense arrays, and a gradient or learning rate is not finite.
                Nothing was sent.
            FleetSparseError: As the client's `push`; or a rest of this worker was interrupted, and the others' steps do
                without it.
        """
        if clip is not None and not self._is_merged:
            rows, dense = clip.clipped(rows, dense)
        if self._is_alone and dense:
            check_finite(rows, dense)
            for each in dense:
                check_outs(each.spec, each.outs)
        with self._stepping:
            self._check_awake()
            replicas = [self._replica_of(update.spec) for update in dense]
            ahead = self._take_ahead()
            step = self._next_step()
            if self._is_merged and self._complete < step - 1:
                self._client.pull([], step=step)  # nothing was looked up since: shards take one step after the other
            weight, merged_clip = (num_examples, clip) if self._is_merged else (1.0, None)
            late = None if ahead is None else ahead.late
            pushes = [RowsPush(*update, self._next_number(update.spec.name)) for update in rows]
            dense_pushes = [self._dense_push(*pair) for pair in zip(dense, replicas, strict=True)]
            factors = None if merged_clip is None else self._factors(merged_clip, pushes, dense_pushes, weight, step)
            # Here, where Ctrl-C ends it.
            self._client.wait_for_room(sum(update.grads.nbytes for update in rows) + sum(d.grads.nbytes for d in dense))
            with DeferredInterrupt(lambda: None):  # a push that went out is counted
                pending: Pending | None
                if factors is not None:
                    pending = self._client.start_scale(factors, dense_pushes, late or (), step=step)
                else:
                    pending = self._client.start_update(pushes, dense_pushes, late, weight=weight, step=step)
                self._count_step(
                    [push.spec.name for push in pushes], [push.spec.name for push in dense_pushes], position
                )
                self._compute(replicas, dense_pushes, dense)
        if pending is not None and (factors is not None or any(push.outs is not None for push in dense_pushes)):
            pending.wait()
            self._note_complete(step)
        if pending is not None and ahead is not None:
            ahead.push(pending)  # not before: rows that came with an answer that failed are not there

    def _count_step(self, tables: Iterable[str], arrays: Iterable[str], position: str) -> None:
        """A step with updates of these went out. Not before: a call that raises what failed earlier sends nothing."""
        with self._lock:
            for name in (*tables, *arrays):
                self._num_updates[name] = self._num_updates.get(name, 0) + 1
            self._step += 1
            num_steps = self._step if self._is_merged else self._passed[-1].num_steps + 1
            self._passed.append(Progress(num_steps, position))

    def _replica_of(self, spec: DenseSpec) -> Replica | None:
        """What the pservers have of a dense array, after all pushes so far; None if new values are waited for."""
        if not self._is_alone or spec.name in self._without_replica:
            return None
        if self._client.num_failed_pushes != self._num_failed_pushes:
            self._replicas.clear()  # the pservers, or some of them, did not do what these did
            self._num_failed_pushes = self._client.num_failed_pushes
        replica = self._replicas.get(spec.name)
        if replica is None:
            try:
                replica = Replica(spec, self._local_dense(spec, self._client.num_shards))
            except PlanError as error:
                logger.warning("%s. Its new values are waited for in every step", error)
                self._without_replica.add(spec.name)
                return None
            replica.read(self._client, step=self._next_step())
            self._replicas[spec.name] = replica
        return replica

    def _compute(
        self, replicas: Sequence[Replica | None], pushes: Sequence[DensePush], dense: Sequence[DenseUpdate]
    ) -> None:
        """New dense values, while the pservers compute them as well."""
        try:
            for replica, push, update in zip(replicas, pushes, dense, strict=True):
                if replica is not None:
                    replica.apply(push)
                    replica.write(update.outs)
        except BaseException:
            self._replicas.clear()  # the pservers do it to the end
            raise

    def _note_complete(self, step: int) -> None:
        with self._lock:
            self._complete = max(self._complete, step)

    def _check_awake(self) -> None:
        if self._rests:
            raise FleetSparseError(
                "exe.run: this worker's barrier was interrupted, and the other workers' steps do without it. Come to "
                "fleet.barrier_worker() or fleet.stop_worker() again"
            )

    def _step_to_begin(self) -> int:
        """Of the pull of rows of the coming step; one who is alone need not even wait for his own push."""
        if not self._counts_steps:
            return 0
        return self._step + 1 if self._is_alone else self._step + 2

    def _take_ahead(self) -> EarlyRows | None:
        """What was begun in this step. If a step before has its push already, this one makes its rows stale."""
        with self._lock:
            ahead = self._ahead
            if ahead is None or not ahead.is_complete:
                return ahead
            self._ahead = None
        ahead.drop()
        return None

    def _factors(
        self, clip: StepClip, rows: Sequence[RowsPush], dense: Sequence[DensePush], weight: float, step: int
    ) -> list[tuple[TableSpec | DenseSpec, NDArray[np.float32]]]:
        """What each gradient of the merged step is multiplied with, from what all shards measured."""
        pending = self._client.start_measure(rows, dense, weight=weight, step=step)
        specs: list[TableSpec | DenseSpec] = [*(push.spec for push in rows), *(push.spec for push in dense)]
        counts = [len(spec.segments) if isinstance(spec, DenseSpec) else 1 for spec in specs]
        sums = {spec.table_id: np.zeros(count) for spec, count in zip(specs, counts, strict=True)}
        for _, block in sorted(pending.wait(), key=lambda answer: answer.shard):
            if block.table_id in sums and block.rows is not None:
                sums[block.table_id] += np.ascontiguousarray(block.rows).view(np.float64).reshape(-1)
        factors = clip.clip.factors(np.concatenate([np.empty(0), *sums.values()]), clip.needs_clip)
        of_specs = np.split(factors, np.cumsum(counts)[:-1])
        return list(zip(specs, of_specs, strict=True))

    def pull_dense(self, spec: DenseSpec, out: NDArray[np.float32]) -> None:
        """As `Training`."""
        self._client.pull_dense(spec, out, step=self._next_step())

    @contextmanager
    def hold(self, timeout_s: float, *, asks: bool = False) -> Iterator[QuiescePoint]:
        """As `Training`."""
        if self._is_merged and not asks:
            with self._stepping:  # the step whose push is on its way counts
                passed = self._last_steps()
            yield QuiescePoint(passed, holds_back=False)
            return
        with self._stepping:
            self._client.reach(timeout_s)
            yield QuiescePoint(self._last_steps()[-1:], holds_back=True)

    def _last_steps(self) -> list[Progress]:
        with self._lock:
            passed = list(self._passed)
            if self._is_merged and self._step > passed[-1].num_steps:  # the job's went on while this worker rested
                passed.append(Progress(self._step, passed[-1].position))
            return passed

    def reload(self, states: Iterable[TableState]) -> None:
        """As `Training`."""
        with self._stepping, self._lock:
            self._num_updates.clear()
            self._replicas.clear()
        self.note_states(states)

    def settle(self) -> None:
        """As `Training`."""
        self._client.flush()
        with self._lock:
            ahead, self._ahead = self._ahead, None  # after a rest the others may have gone on
        if ahead is not None:
            ahead.drop()

    def rest(self) -> None:
        """As `Training`; where steps are not counted nobody waits for anybody."""
        self.settle()
        if self._counts_steps:
            self._rests = True
            step = self._client.rest()
            with self._lock:
                self._step, self._complete, self._rests = step, step, False

    def close(self) -> None:
        """As `Training`."""

    def _next_step(self) -> int:
        with self._lock:
            return self._step + 1 if self._counts_steps else 0

    def _dense_push(self, update: DenseUpdate, replica: Replica | None) -> DensePush:
        number = self._next_number(update.spec.name)
        outs = update.outs if replica is None else None
        return DensePush(update.spec, update.grads, outs, update.learning_rate, number)

    def _next_number(self, name: str) -> int:
        with self._lock:
            return self._num_updates.get(name, 0) + 1
