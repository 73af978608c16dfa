"""PserverTraining: the steps of a worker whose gradients are applied on the pservers, in sync and async mode."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.mode import ALL_REDUCE, SYNC, Mode
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import FleetSparseError, PushRefused
from fleet_sparse.wire.control import TableState
from fleet_sparse.wire.row_dtype import RowDtype

from ..net.deferred_interrupt import DeferredInterrupt
from ..net.requests import DenseUpdate
from ..net.table_client import TableCall, TableClient
from ..rows.deduplicator import Deduplicator
from ..rows.early_rows import EarlyRows
from ..rows.row_batch import RowBatch
from ..rows.row_caches import RowCaches
from ..rows.row_source import RowSource
from .held_sender import HeldSender
from .step import Progress, QuiescePoint, RowsClip, StepClip, check_finite

_MAX_PASSED = 1000  # steps that may pass before a save in sync training reads this worker's position


class PserverTraining:
    """Implements `Training`: every gradient is sent to the shards, which have the update rules.

    Args:
        client: This worker's client.
        deduplicator: Deduplicator with the shards' placement.
        mode: Mode of the job; not geo.
        num_workers: Number of workers of the job.
        caches: This worker's caches of rows; None for none.
        begun_behind: The step after which this worker begins; another one than 0 in the place of one that died.

    Attributes:
        held: Sends what the caches hold back, in sync mode with several workers.
    """

    def __init__(
        self,
        client: TableClient,
        deduplicator: Deduplicator,
        mode: Mode,
        num_workers: int,
        caches: RowCaches | None = None,
        begun_behind: int = 0,
    ) -> None:
        self._client = client  # constant after construction, as all down to `_is_merged`
        self._caches = caches
        self._deduplicator = deduplicator
        self._counts_steps = mode.is_step_synchronized
        self._has_lag = mode.max_step_lag is not None
        self._dense_dtype = RowDtype[mode.dense_grads_dtype.upper()]
        self._is_single_worker = num_workers == 1
        self._refuses_dense = mode.dense == ALL_REDUCE and num_workers > 1
        self._is_merged = (
            mode.kind == SYNC and not self._is_single_worker
        )  # with other workers' contributions, on the shards
        self._stepping = threading.Lock()  # held from the number of a step to its push: they go out in order
        # Guards all below. The garbage collector may end a `look_ahead` inside a block, which calls `abandon_early`.
        self._lock = threading.RLock()
        self._is_left = False  # it left the step group, or began to and was interrupted
        self._step = begun_behind  # newest step that this worker pushed
        self._complete = 0  # newest step that every shard is known to have completed, in sync
        self._early: EarlyRows | None = None  # rows of the step after the present one
        self._num_updates: dict[str, int] = {}  # by table, of this worker: Adam's t
        self._passed = deque([Progress(0, None)], maxlen=_MAX_PASSED)  # the last steps
        self.held = HeldSender(caches if self._is_merged else None, self._send_part, lambda: self._step)

    def note_states(self, states: Iterable[TableState], *, are_replaced: bool = False) -> None:
        """As `Training`: update counts continue from those of the pservers' tables."""
        with self._stepping if are_replaced else nullcontext():
            if are_replaced and self._caches is not None:
                self._caches.clear()
            with self._lock:
                if are_replaced:
                    self._num_updates.clear()
                for state in states:
                    self._num_updates[state.name] = max(self._num_updates.get(state.name, 0), state.optimizer_step)

    def pull(self, batches: Sequence[RowBatch]) -> None:
        """As `Training`."""
        step = self._next_step() if self._counts_steps else 0
        read = self._client.pull if self._caches is None else self._caches.read
        read(batches, step=step)
        if step > 1:
            self._note_complete(step - 1)

    def prefetch(
        self, batches: Sequence[RowBatch], early: EarlyRows | None = None, coming: EarlyRows | None = None
    ) -> None:
        """As `Training`.

        With a row cache rows of the next step that no copy is made of are pulled now, if this one does not touch them.
        The push of this step asks for the others; where other workers go on meanwhile, only for those that have no
        copy. In sync training of several workers with a clip by norm nothing is asked for ahead.
        """
        step = self._next_step() if self._counts_steps else 0
        if self._caches is not None:
            while not self._caches.pull(batches, early, coming, step=step):
                early, step = None, self._next_step()
            coming = None
        else:
            is_looked_ahead = self._early is not None or coming is not None
            source = self._begin_step(early, coming) if is_looked_ahead else self._client
            source.pull(batches, step=step)
        if step > 1:
            self._note_complete(step - 1)
        if coming is not None:
            coming.begin(
                self._client,
                self._deduplicator,
                batches,
                step=self._early_step(),
                merges=self._is_merged,
            )

    def abandon_early(self, early: EarlyRows) -> None:
        """As `Training`."""
        if self._caches is not None:
            self._caches.abandon(early)
        with self._lock:
            if self._early is early:
                self._early = None
        early.abandon()

    def _begin_step(self, early: EarlyRows | None, coming: EarlyRows | None) -> RowSource:
        """The source of the rows of a step; early-pulled rows of another one are dropped."""
        with self._lock:
            ready = self._early if self._early is not None and self._early.is_complete else None
            # A run that nobody announced may be an evaluation; if it trains, its update makes these rows stale.
            keeps = ready is not None and early is None and coming is None
            if not keeps:
                self._early = coming
        if ready is not None and ready is early:
            return ready
        if ready is not None and not keeps:
            ready.clear()
        if early is not None:
            early.drain()  # this step pulls into the same memory
        return self._client

    def update(
        self,
        rows: Sequence[RowBatch],
        dense: Sequence[DenseUpdate],
        num_examples: float,
        clip: StepClip | None = None,
        position: str | None = "",
        *,
        rows_clip: RowsClip | None = None,
    ) -> None:
        """As `Training`; waits for the new dense values, if there are any.

        With a `position` of None this worker trains nothing in the step, and keeps its position.

        A `rows_clip` takes the place of `clip` in a step whose dense gradients the workers merge.

        Ctrl-C does not divide it: a step that was sent counts, and the second phase of a clipped one follows the first.

        Raises:
            PushRefused: A gradient or learning rate is not finite, and this worker is the only one and trains dense
                arrays, or caches rows and shares no steps with others. Nothing was sent, and no copy changed.
            FleetSparseError: As the client's `push`; or this worker left the step group and did not rejoin it; or the
                workers merge dense gradients, and this one is not connected with the others. Nothing was sent. No copy
                changed, unless the window was full until the deadline: then the copies have the updates of the step.
        """
        if dense and self._refuses_dense:  # the program would train what `outs` gets, which would be values
            raise FleetSparseError(
                "exe.run: this worker is not connected with the others, with which it merges dense gradients. "
                "fleet.init_worker() or an earlier exe.run did not end; look at its error, and start the job again"
            )
        sender: TableClient | RowCaches = self._client
        if self._caches is not None or clip is not None:
            sender, rows, dense = self._checked(rows, dense, clip)
        elif self._is_single_worker and dense:
            check_finite(rows, dense)
        with self._stepping:
            if self._is_left:
                raise FleetSparseError(
                    "exe.run: this worker left the step group when its barrier was interrupted. Call "
                    "fleet.barrier_worker() or fleet.stop_worker() to rejoin"
                )
            early = self._take_early() if self._early is not None else None
            step = self._next_step() if self._counts_steps else 0
            if self._is_merged and self._complete < step - 1:
                self._client.pull([], step=step)  # nothing was looked up since: shards process the steps in order
            late = None if early is None else early.late
            updates = self._numbered(dense) if dense else []
            counts = self._num_updates
            batches = []
            for spec, unique, grads, learning_rate, _, statistics in rows:
                batches.append(RowBatch(spec, unique, grads, learning_rate, counts.get(spec.name, 0) + 1, statistics))
            merged_clip = rows_clip or (clip if self._is_merged else None)
            with DeferredInterrupt():
                if merged_clip is not None:
                    tables = [batch.spec for batch in batches] if rows_clip is None else rows_clip.tables
                    pending = self._two_phases(
                        *(sender, merged_clip, tables, batches, updates, late or (), num_examples, step)
                    )
                else:
                    weight = num_examples if self._is_merged else 1.0
                    pending = sender.start_update(batches, updates, late, weight=weight, step=step)
                pending.wait_accepted()
                self._count_step(batches, updates, position)
        waits = merged_clip is not None
        for update in updates:
            waits |= update.outs is not None
        if waits:
            self._wait_for(pending)
            if pending.wants_answers:
                self._note_complete(step)
        if early is not None:
            early.push(pending)  # not before: rows that arrived with an answer that failed are missing

    def _wait_for(self, pending: TableCall) -> None:
        """Waits for the push of a step. If the wait fails, the rows that come with the answers are dropped."""
        try:
            pending.wait()
        except BaseException:
            if self._caches is not None:
                self._caches.drop_ahead()
            raise

    def _checked(
        self, rows: Sequence[RowBatch], dense: Sequence[DenseUpdate], clip: StepClip | None
    ) -> tuple[TableClient | RowCaches, Sequence[RowBatch], Sequence[DenseUpdate]]:
        """Weighs, clips and checks the gradients of a step; returns what it is sent through, and the gradients.

        It is sent through the caches unless the pservers will refuse it: where workers share their steps, they refuse
        one with a gradient that is not finite for all workers.

        Raises:
            PushRefused: As `update`.
        """
        caches = self._caches
        if caches is not None:
            rows = [caches.weighted(each) for each in rows]
        if clip is not None and not self._is_merged:
            rows, dense = clip.clipped(rows, dense)
        is_checked_here = self._is_single_worker or (caches is not None and not self._is_merged)
        of_worker = dense if is_checked_here else ()
        if caches is None:
            if of_worker:
                check_finite(rows, of_worker)
            return self._client, rows, dense
        try:
            check_finite([each._replace(values=caches.as_sent(each.values)) for each in rows], of_worker)
        except PushRefused:
            if not self._is_merged:
                raise
            return self._client, rows, dense
        return caches, rows, dense

    @property
    def holds_back(self) -> bool:
        """As `Training`."""
        return self.held.holds_back

    def send_held(self) -> bool:
        """As `Training`."""
        return self.held.send()

    @property
    def num_trained(self) -> int:
        """As `Training`."""
        return self.held.num_trained if self.holds_back else 0

    def note_trained(self, num_trained: int) -> None:
        """As `Training`."""
        with self._lock:
            self.held.num_trained = max(self.held.num_trained, num_trained)

    def end_pass(self) -> None:
        """As `Training`."""
        if not self._is_merged and self._caches is not None:
            with self._stepping:
                if self._caches.num_held:
                    self._flush_caches(self._caches)

    def _send_part(self) -> None:
        """Makes a step that sends a part of what the caches hold."""
        assert self._caches is not None, "updates are held back"
        # Others may make steps first, and a save may pause them, which needs `_stepping`.
        while self._complete < (step := self._next_step()) - 1:
            self._client.pull([], step=step)
            self._note_complete(step - 1)
        with self._stepping:
            self._flush_part(self._caches)

    def _flush_caches(self, caches: RowCaches) -> None:
        """Sends all that row caches hold, where this worker's steps are its own; with `_stepping` held.

        The error of a part that a pserver refuses is raised by a later call. The only worker of a job holds its copies
        again then, and sends them with a later part.
        """
        for _ in range(caches.num_flushes if self._counts_steps else 1):
            self._flush_part(caches)
            if not caches.num_held:
                return

    def _flush_part(self, caches: RowCaches) -> None:
        """Sends what row caches hold, as a push of its own: as much as a pserver may stage, where steps are counted."""
        step = self._next_step() if self._counts_steps else 0
        with DeferredInterrupt():
            pending = caches.start_flush(self._num_updates, step=step, in_parts=self._counts_steps)
            with self._lock:
                self._step += 1
                if self._is_merged:  # the steps are the job's
                    self._passed.append(self._newest())
        pending.wait()

    def skip(
        self,
        rows: Sequence[RowBatch],
        dense: Sequence[DenseUpdate],
        clip: StepClip | None = None,
        position: str = "",
    ) -> None:
        """As `Training`: in sync training with several workers an update of weight 0, with no row of the same tables.

        Raises:
            FleetSparseError: As `update`.
        """
        if not self._is_merged:
            return
        nothing = np.empty(0, np.int64)
        without_rows = [batch.at(nothing) for batch in rows]
        zeros = [update._replace(grads=np.zeros_like(update.grads)) for update in dense]
        self.update(without_rows, zeros, 0.0, clip, position)

    def _numbered(self, dense: Sequence[DenseUpdate]) -> list[DenseUpdate]:
        """The updates with the step count of their rule, and the encoding of the job."""
        counts, dtype = self._num_updates, self._dense_dtype
        return [
            update._replace(
                optimizer_step=counts.get(update.spec.name, 0) + 1,
                dtype=RowDtype.FLOAT32 if update.spec.update_rule.is_summed else dtype,  # sums take no rounding
            )
            for update in dense
        ]

    def _two_phases(
        self,
        sender: TableClient | RowCaches,
        clip: StepClip | RowsClip,
        tables: Sequence[TableSpec],
        rows: Sequence[RowBatch],
        dense: Sequence[DenseUpdate],
        late: Sequence[RowBatch],
        weight: float,
        step: int,
    ) -> TableCall:
        """Sends a step that the shards clip: the norms of its merged gradients first, then their factors."""
        prepared = sender.start_prepare(rows, dense, weight=weight, step=step)
        specs: list[TableSpec | DenseSpec] = [*tables, *(update.spec for update in dense)]
        counts = [len(spec.segments) if isinstance(spec, DenseSpec) else 1 for spec in specs]
        sums = {spec.table_id: np.zeros(count) for spec, count in zip(specs, counts, strict=True)}
        answers = sorted(prepared.wait(), key=lambda answer: answer.shard)
        for _, block, _ in answers:
            if block.table_id in sums and block.rows is not None:
                sums[block.table_id] += np.ascontiguousarray(block.rows).view(np.float64).reshape(-1)
        factors = clip.factors(np.concatenate([np.empty(0), *sums.values()]))
        of_specs = zip(specs, np.split(factors, np.cumsum(counts)[:-1]), strict=False)  # one part without specs
        in_step = {block.table_id for _, block, _ in answers}  # a worker without rows has the tables of the others
        of_step = [(spec, each) for spec, each in of_specs if spec.table_id in in_step]
        return sender.start_commit(of_step, dense, late, step=step)

    def _count_step(self, rows: Sequence[RowBatch], dense: Sequence[DenseUpdate], position: str | None) -> None:
        """Counts a step that was sent. Not before: a call that raises an earlier error sends nothing."""
        with self._lock:
            for batch in rows:
                self._num_updates[batch.spec.name] = batch.optimizer_step
            for update in dense:
                self._num_updates[update.spec.name] = update.optimizer_step
            self._step += 1
            before, is_trained = self._passed[-1], position is not None
            if is_trained:
                self.held.num_trained += 1
            if self._is_merged:  # the steps are the job's
                num_steps, num_untrained = self._step, self._step - self.held.num_trained
            else:
                num_steps, num_untrained = before.num_steps + 1, before.num_untrained + (not is_trained)
            self._passed.append(Progress(num_steps, position if is_trained else before.position, 0, num_untrained))

    def _note_complete(self, step: int) -> None:
        with self._lock:
            self._complete = max(self._complete, step)

    def _early_step(self) -> int:
        """Step of an early pull; a single worker need not even wait for its own push."""
        if not self._counts_steps:
            return 0
        with self._lock:
            return self._step + 1 if self._is_single_worker else self._step + 2

    def _take_early(self) -> EarlyRows | None:
        """The rows whose pull began in this step. If a step before has its push already, this one makes them stale."""
        with self._lock:
            early = self._early
            if early is None or not early.is_complete:
                return early
            self._early = None
        early.clear()
        return None

    def pull_dense(self, spec: DenseSpec, out: NDArray[np.float32]) -> None:
        """As `Training`."""
        self._client.pull_dense(spec, out, step=self._next_step())

    def progress(self) -> Progress:
        """As `Training`."""
        with self._lock:
            newest = self._newest()
            return newest._replace(pushed_step=self._step) if self._has_lag else newest

    @contextmanager
    def quiesce(self, timeout_s: float, *, is_coordinator: bool = False) -> Iterator[QuiescePoint]:
        """As `Training`."""
        if self._is_merged and not is_coordinator:
            with self._stepping:  # a step whose push is being sent counts
                passed = self._last_steps()
            yield QuiescePoint(passed, holds_back=False)
            return
        with self._stepping:
            if self._caches is not None and not self._is_merged and self._caches.num_held:
                self._flush_caches(self._caches)
            self._client.reach(timeout_s)
            yield QuiescePoint(self._last_steps()[-1:], holds_back=True)

    def _last_steps(self) -> list[Progress]:
        with self._lock:
            passed, newest = list(self._passed), self._newest()
            if passed[-1].num_steps == newest.num_steps:
                passed.pop()
            return [*passed, newest]

    def _newest(self) -> Progress:
        """The position after the newest step; in sync the job makes steps while this worker is away."""
        newest = self._passed[-1]
        if not self._is_merged:
            return newest
        return newest._replace(num_steps=self._step, num_untrained=self._step - self.held.num_trained)

    def drain(self, *, leaves: bool = False) -> None:
        """As `Training`; in a job that does not count steps there is no step group to leave.

        What row caches hold is sent. In sync training with several workers that takes steps of its own, made only
        before this worker leaves the step group. In the last ones of them nobody trains.
        """
        if self._caches is not None:
            if leaves and self.holds_back:
                self.held.send(is_leaving=True)
            elif not self._is_merged and self._caches.num_held:
                with self._stepping:
                    self._flush_caches(self._caches)
            if leaves or not self._is_merged:  # the others may continue before this worker's next step
                self._caches.drop_ahead()
        self._client.flush()
        with self._lock:
            early, self._early = self._early, None  # the others may continue
        if early is not None:
            early.clear()
        if leaves and self._counts_steps:
            self._is_left = True
            step = self._client.leave()
            with self._lock:
                # Where updates are held back, some of the steps may have sent them, as a barrier tells.
                if self._is_merged and not self.holds_back:
                    self.held.num_trained += step - self._step
                self._step, self._complete, self._is_left = step, step, False
            self.held.note_sent()

    def close(self) -> None:
        """As `Training`."""

    def _next_step(self) -> int:
        if not self._counts_steps:
            return 0
        with self._lock:
            return self._step + 1
