"""Steps: how the pushes of a job's workers become one commit a step, with or without two-phase clipping."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.watermark import Watermark
from fleet_sparse.errors import ErrorCode
from fleet_sparse.wire.frame_format import Action, Block, Header, Op

from ..refusal import Refusal
from ..tables.mutations import CopyMutation, Mutation, Push
from ..tables.row_asks import CacheTerms
from .dedup import DedupLedger
from .job import Contribution, Job, PreparedStep, watermark_of
from .plain_frames import PlainPush
from .progress import NO_PROGRESS, Progress
from .table_map import TableMap
from .validate import find_factors, find_mutations

Commit = Callable[[Sequence[Watermark], Sequence[Mutation | PlainPush], Progress], None]
"""A shard's `commit`."""

_ALIKE = "the programs that workers run in one step should train the same and have the same grad_clip"


class Steps:
    """Takes the pushes of steps, stages them where the mode says so, and commits what is complete.

    Args:
        tables: Tables of the shard.
        commit: The shard's.
    """

    def __init__(self, tables: TableMap, commit: Commit) -> None:
        self._tables = tables
        self._commit = commit

    def accept(
        self,
        job: Job,
        ledger: DedupLedger,
        header: Header,
        blocks: Sequence[Block],
        cache_terms: CacheTerms | None = None,
    ) -> None:
        """Takes a push that is new, and commits what it completes.

        Args:
            job: The job.
            ledger: Pushes of all clients.
            header: Header of the push.
            blocks: Its blocks.
            cache_terms: As of `Jobs`.

        Raises:
            Refusal: A check failed, here or in the merged step. Nothing was applied.
        """
        worker = job.worker_of(header)
        assert worker is not None, "checked by check_step"
        if header.op is Op.LEAVE:
            ledger.stage(header.client_id, header.push_seq)
            job.leave(header, worker)
        elif job.is_applied(header, worker):
            self._commit([watermark_of(header)], [], NO_PROGRESS)
        elif header.op is Op.COMMIT:
            self._accept_factors(job, worker, header, blocks)
        else:
            self._accept_gradients(job, ledger, worker, header, blocks, cache_terms)
        self._complete(job)

    def accept_plain(self, job: Job, header: Header, push: PlainPush, num_bytes: int) -> bool:
        """Commits a new push that is not merged with others; returns False, and nothing changed, if `accept` must.

        Args:
            job: The job.
            header: Header of the push; its client is a worker of the job.
            push: The push.
            num_bytes: Size of its ids and gradients.
        """
        worker = job.worker_of(header)
        assert worker is not None, "checked by the shard"
        if not job.merges_nothing(header) or job.find_fault(header, worker, num_bytes) is not None:
            return False
        self._commit([watermark_of(header)], [push], _step_of(header))
        job.advance(header, worker)
        return True

    def fail(self, job: Job, header: Header, error: Exception) -> bool:
        """Fails the step of a push that was refused, or failed, if its job stages pushes; returns whether it did."""
        worker = job.worker_of(header)
        if not job.is_sync or worker is None or (header.step == 0 and header.op is not Op.LEAVE):
            return False
        job.fail(ErrorCode.STEP_FAILED, f"worker {worker}: {_reason_of(error)}")
        return True

    def _accept_gradients(
        self,
        job: Job,
        ledger: DedupLedger,
        worker: int,
        header: Header,
        blocks: Sequence[Block],
        cache_terms: CacheTerms | None,
    ) -> None:
        found = find_mutations(self._tables, blocks, is_staged=job.is_sync, cache_terms=cache_terms)
        pushes = [each for each in found if isinstance(each, Push)]
        changes = [each for each in found if isinstance(each, CopyMutation)]
        _check_due(job, worker, header, [*pushes, *changes])
        if job.is_sync:
            ledger.stage(header.client_id, header.push_seq)
            # The merged step has other hashes.
            kept = pushes if job.is_single_worker else [push._replace(hashes=None) for push in pushes]
            job.stage(header, worker, kept, [change._replace(hashes=None) for change in changes])
        elif header.part + 1 < header.num_parts:
            ledger.stage(header.client_id, header.push_seq)
            job.keep_part(worker, [each._replace(hashes=None) for each in (*pushes, *changes)])
        else:
            mutations = [*job.take_parts(worker), *pushes, *changes]
            self._commit([watermark_of(header)], mutations, Progress(header.step))
        if header.op is Op.PREPARE:
            job.prepare(header, worker)
        else:
            job.advance(header, worker)

    def _accept_factors(self, job: Job, worker: int, header: Header, blocks: Sequence[Block]) -> None:
        """Applies a prepared step with the factors of the first worker that commits; all others have the same."""
        factors = find_factors(self._tables, blocks)
        _check_due(job, worker, header, [])
        prepared, watermarks = job.prepared, [watermark_of(header)]
        if prepared.factors is None:
            for push in prepared.pushes:
                if push.table_id not in factors:
                    where = self._tables[push.table_id].table.where
                    raise Refusal(ErrorCode.MALFORMED, f"{where}: COMMIT of step {header.step} lacks it; {_ALIKE}")
            pushes, prepared.pushes = prepared.pushes, []
            clipped = [self._tables[push.table_id].table.clip(push, factors[push.table_id]) for push in pushes]
            self._commit(watermarks, clipped, _step_of(header)._replace(factors=factors))
            prepared.factors = factors
            job.early_pulls.mark(clipped, self._tables)
        else:
            if header.part == 0 and not _are_equal(factors, prepared.factors):
                raise Refusal(
                    ErrorCode.MALFORMED,
                    f"header: the factors of step {header.step} are not those of another worker; {_ALIKE}",
                )
            self._commit(watermarks, [], _step_of(header))
        job.advance(header, worker)

    def _complete(self, job: Job) -> None:
        """Commits what was staged if its step is complete, or prepared by all."""
        try:
            if contributions := job.take_prepared():
                pushes = self._merged(job, contributions)
                self.restore_prepared(job, job.staged_step, pushes)
                watermarks = [contribution.watermark for contribution in contributions]
                self._commit(watermarks, [], Progress(prepared=pushes))
            if contributions := job.take_complete():
                changes = [change for contribution in contributions for change in contribution.changes]
                mutations = [*self._merged(job, contributions), *changes]
                watermarks = [contribution.watermark for contribution in contributions]
                self._commit(watermarks, mutations, Progress(job.staged_step))
                job.early_pulls.mark(mutations, self._tables)
        except Exception as error:  # not caused by one worker's push
            job.fail(ErrorCode.STEP_FAILED, _reason_of(error), step=job.staged_step)
            raise
        if job.clock.have_all_left:
            self.rejoin(job)

    def rejoin(self, job: Job) -> None:
        """All workers, which have left the step group, rejoin it."""
        self._commit(job.left, [], Progress(rejoins=True))
        job.rejoin_all()

    def restore_prepared(self, job: Job, step: int, pushes: list[Push]) -> None:
        """Makes a merged step the one that COMMIT applies."""
        job.prepared = PreparedStep(step, pushes, [self._norms(push) for push in pushes])

    def restore_committed(self, job: Job, factors: Mapping[int, NDArray[np.float32]]) -> list[Push]:
        """Returns the pushes of the prepared step times their factors, which are kept; the caller applies them."""
        pushes, job.prepared.pushes, job.prepared.factors = job.prepared.pushes, [], factors
        return [self._tables[push.table_id].table.clip(push, factors[push.table_id]) for push in pushes]

    def _merged(self, job: Job, contributions: Sequence[Contribution]) -> list[Push]:
        """Returns one push for each table of a step."""
        by_table: dict[int, list[list[Push]]] = {}
        for contribution in contributions:
            of_worker: dict[int, list[Push]] = {}
            for push in contribution.pushes:
                of_worker.setdefault(push.table_id, []).append(push)
            for table_id, pushes in of_worker.items():
                by_table.setdefault(table_id, []).append(pushes)
        return [self._merged_table(job, table_id, pushes) for table_id, pushes in by_table.items()]

    def _merged_table(self, job: Job, table_id: int, pushes: Sequence[Sequence[Push]]) -> Push:
        table = self._tables[table_id].table
        merged = table.merge(pushes, job.mode.scale)
        # Shards may have seen different numbers of pushes of a single worker: its own count is the same for all.
        return merged if job.is_single_worker else merged._replace(step=table.optimizer_step + 1)

    def _norms(self, push: Push) -> Block:
        """Returns the sums of squares of a merged push."""
        table = self._tables[push.table_id].table
        sums = table.squared_norms(push)
        rows = sums.view(np.float32).reshape(-1, 2)
        return Block(Action.NORMS, push.table_id, table.spec.schema_hash, 2, len(sums), None, rows)


def _step_of(header: Header) -> Progress:
    """Returns what the push with this header completes: the step of its worker, if it is the last part."""
    return Progress(header.step if header.part + 1 == header.num_parts else 0)


def _reason_of(error: Exception) -> str:
    """Returns why a step failed, for the other workers."""
    return error.error.message if isinstance(error, Refusal) else f"{type(error).__name__}: {error}"


def _check_due(job: Job, worker: int, header: Header, pushes: Sequence[Push | CopyMutation]) -> None:
    fault = job.find_fault(header, worker, sum(push.num_bytes for push in pushes))
    if fault is not None:
        raise Refusal(*fault)


def _are_equal(factors: Mapping[int, NDArray[np.float32]], others: Mapping[int, NDArray[np.float32]]) -> bool:
    return factors.keys() == others.keys() and all(np.array_equal(factors[key], others[key]) for key in factors)
