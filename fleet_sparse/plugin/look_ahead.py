"""look_ahead: pulls the rows of the next batch while the current one is computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle.base.libpaddle import pir

from fleet_sparse.errors import PlanError
from fleet_sparse.transpiler.plan import RewritePlan
from fleet_sparse.worker.modes.step import Training
from fleet_sparse.worker.rows.deduplicator import BatchSequence, Deduplicator

from .active_session import active
from .resumable import Resumable, batches_from
from .static import op_callbacks, programs
from .static.prefetch_queue import ExpectedBatch, ExpectedTable, PrefetchQueue

Feed = Mapping[str, Any]
_Feed = TypeVar("_Feed", bound=Feed)

_Ids = Mapping[int, NDArray[Any]]
"""Ids of each lookup whose ids are fed, by its index in the plan, flat."""


def look_ahead(
    loader: Iterable[Any], program: pir.Program | None = None, *, feed: Callable[[Any], Feed] | None = None
) -> LookAhead:
    """The feeds of `loader`, read one batch early, so that the rows of the next batch can be pulled early.

    ```python
    feeds = fleet_sparse.look_ahead(loader)
    for epoch in range(2):
        for feed in feeds:
            exe.run(program, feed=feed, fetch_list=[loss])
    ```

    With one worker, and in sync training with several, losses are bit by bit those of the plain loop. A step that runs
    with another batch than the yielded one pulls as without `look_ahead`, and so does a step whose ids are invalid: its
    run raises the error. Rows are not pulled early in geo training, nor for ids that are computed in the program.

    Args:
        loader: An iterable of feeds: dicts by name of input, or lists of one such dict, as of `paddle.io.DataLoader`
            with `feed_list` and `return_list=False`. Reading a batch must not change the one before. An error of the
            loader is raised after the batches before it. Each iteration iterates the loader again.
        program: The minimized program; by default the default main program.
        feed: Converts what the loader yields to a feed, which is then yielded; by default the loader yields feeds.

    Raises:
        PlanError: The program does not train, or all ids of its lookups are computed. While batches are read: a batch
            is not a feed, or its ids changed when the next one was read.
        FleetSparseError: A batch is read before `fleet.init_worker()`.
    """
    program = paddle.static.default_main_program() if program is None else program
    plan = programs.plan_of(program)
    if plan is None or not any(all(plan.sites[site].fed_by for site in table.sites) for table in plan.tables):
        raise PlanError(
            "look_ahead: the program has no table that is trained on fed ids. Call minimize first; if all ids are "
            "computed in the program, leave look_ahead out"
        )
    return LookAhead(loader, plan, feed)


class LookAhead:
    """An iterable of feeds, as long as the loader."""

    def __init__(self, loader: Iterable[Any], plan: RewritePlan, feed: Callable[[Any], Feed] | None) -> None:
        self._loader = loader
        self._plan = plan
        self._feed = feed

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self._loader, Resumable):
            return self._loader.read_by(self._read)
        return self._read(iter(self._loader))

    def skip(self, num_batches: int) -> Iterator[Any]:
        """The feeds without the first `num_batches`."""
        return self._read(batches_from(self._loader, num_batches))

    def _read(self, batches: Iterator[Any]) -> Iterator[Any]:
        return _ahead(batches if self._feed is None else map(self._feed, batches), self._plan)

    def __len__(self) -> int:
        """Raises `TypeError` if the loader has no length."""
        return len(self._loader)  # type: ignore[arg-type]  # raises TypeError without a length


def _ahead(batches: Iterator[Any], plan: RewritePlan) -> Iterator[Any]:
    announcer = _Announcer(plan)
    try:
        yield from _announced(batches, plan, announcer)
    except GeneratorExit:  # the loop ended early, and keeps no memory of batches that it does not run
        announcer.withdraw()
        raise


def _announced(batches: Iterator[Any], plan: RewritePlan, announcer: _Announcer) -> Iterator[Any]:
    waiting: deque[tuple[Any, _Ids]] = deque()
    while True:
        try:
            batch = next(batches)
            ids = {site: array.copy() for site, array in _ids_of(plan, _feed_of(batch)).items()}
        except Exception as error:  # StopIteration too: it ends the plain loop after the waiting batch
            end = error
            break
        for before, ids_then in waiting:
            _check_unchanged(ids_then, _ids_of(plan, _feed_of(before)))
        announcer.announce(announcer.prepare(ids))
        waiting.append((batch, ids))
        if len(waiting) == 2:
            yield waiting.popleft()[0]
    yield from (batch for batch, _ in waiting)
    if not isinstance(end, StopIteration):
        raise end
    active().end_pass()


def prepared(feeds: Iterator[_Feed], plan: RewritePlan) -> Iterator[tuple[_Feed, ExpectedBatch | None]]:
    """Yields each feed, and its batch as the next steps expect it; None if its ids are not known or invalid.

    The distinct ids of a feed are found on the thread that iterates. Nothing changes a feed afterwards.
    """
    announcer = _Announcer(plan)
    for feed in feeds:
        yield feed, announcer.prepare(_ids_of(plan, feed))


def announced(feeds: Iterator[tuple[_Feed, ExpectedBatch | None]], plan: RewritePlan) -> Generator[_Feed, None, None]:
    """As `look_ahead` for prepared feeds."""
    announcer = _Announcer(plan)
    waiting: deque[_Feed] = deque()
    try:
        while True:
            try:
                feed, batch = next(feeds)
            except Exception as error:  # StopIteration too
                end = error
                break
            announcer.announce(batch)
            waiting.append(feed)
            if len(waiting) == 2:
                yield waiting.popleft()
        yield from waiting
    except GeneratorExit:
        announcer.withdraw()
        raise
    if not isinstance(end, StopIteration):
        raise end


def _feed_of(batch: Any) -> Feed:
    if isinstance(batch, (list, tuple)) and len(batch) == 1:
        (batch,) = batch
    if not isinstance(batch, Mapping):
        raise PlanError(
            f"look_ahead: the loader yields a {type(batch).__name__}, should be a dict by name of input. "
            "Write look_ahead(loader, feed=lambda batch: {...}), which yields these dicts"
        )
    return batch


def _ids_of(plan: RewritePlan, feed: Feed) -> _Ids:
    found = {}
    for number, site in enumerate(plan.sites):
        if site.fed_by and all(name in feed for name in site.fed_by):
            parts = [np.asarray(feed[name]).reshape(-1) for name in site.fed_by]
            found[number] = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return found


def _check_unchanged(then: _Ids, now: _Ids) -> None:
    if then.keys() != now.keys() or not all(np.array_equal(then[site], now[site]) for site in then):
        raise PlanError(
            "look_ahead: the ids of a batch changed when the loader made the next one, should be unchanged until the "
            "batch was run. Yield a new dict with new arrays for each batch"
        )


class _Announcer:
    """Announces the batches of one loop to the session: one call before the run of the batch before."""

    def __init__(self, plan: RewritePlan) -> None:
        self._plan = plan
        self._deduplicator: Deduplicator | None = None
        self._sequences: list[BatchSequence] = []  # one for each table of the plan
        self._queue: PrefetchQueue | None = None
        self._training: Training | None = None
        self._announced: deque[ExpectedBatch] = deque(maxlen=2)  # as many as the queue has

    def prepare(self, ids: _Ids) -> ExpectedBatch | None:
        """Returns a batch to announce; None for invalid ids, of which the run of the batch raises the error.

        Raises:
            FleetSparseError: There are no pservers.
        """
        deduplicator = active().connection("look_ahead").deduplicator
        if self._deduplicator is not deduplicator:
            lookups = [op_callbacks.lookups_of(self._plan, table) for table in self._plan.tables]
            self._deduplicator, self._sequences = deduplicator, [*map(deduplicator.sequence, lookups)]
        tables: dict[int, ExpectedTable] = {}
        known: dict[int, NDArray[Any]] = {}
        for number, (table, sequence) in enumerate(zip(self._plan.tables, self._sequences, strict=True)):
            if all(site in ids for site in table.sites):
                of_table = {site: ids[site] for site in table.sites}
                positions = [np.empty(len(each), np.int64) for each in of_table.values()]
                try:
                    tables[number] = ExpectedTable(sequence.place([*of_table.values()], positions), positions)
                except ValueError:
                    return None
                known |= of_table
        return ExpectedBatch(known, tables) if tables else None

    def announce(self, batch: ExpectedBatch | None) -> None:
        """Announces a batch that was prepared in the order of the batches."""
        if batch is not None:
            session = active()
            self._queue, self._training = session.prefetch_queue, session.connection("look_ahead").training
            self._queue.expect(self._plan, batch)
            self._announced.append(batch)

    def withdraw(self) -> None:
        """Announced batches that were not run are not expected any more, and their rows are released."""
        if self._queue is not None:
            self._queue.forget(self._plan, self._announced)
        for batch in self._announced:
            if self._training is not None and batch.rows is not None:
                self._training.abandon_early(batch.rows)
