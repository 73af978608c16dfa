"""Resumable loaders: a job that begins with a snapshot continues after the last batch that the snapshot has."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from fleet_sparse.worker.control.resumed import Position

from .active_session import active
from .session import Session

logger = logging.getLogger(__name__)


def resumable(loader: Any) -> Resumable:
    """The batches of `loader`, from the position of this worker in the snapshot that the pservers began with.

    ```python
    feeds = fleet_sparse.resumable(loader)
    for epoch in range(feeds.epoch, 10):
        for feed in feeds:
            exe.run(program, feed=feed, fetch_list=[loss])
    ```

    One pass over it is one epoch. Each snapshot has the epoch of this worker and the number of its batches that are
    done: those that were yielded before a training step ran. After a restart the first pass begins with the next batch,
    and `epoch` is the epoch of the snapshot. A pass that ends early counts as an epoch if a step ran in it.

    Earlier batches are read and dropped, unless the loader has a method `skip(n)` that returns an iterable of its
    batches without the first n. In both cases an epoch must always have the same batches in the same order: seed
    shuffling with `epoch`.

    A data set of `paddle.distributed` is a loader, too: give the result to `exe.train_from_dataset` in its place, where
    each call is one epoch. Its batches are the same in every epoch, or those of `local_shuffle` in the loop, which then
    depends on the epoch, the seed and the worker alone.

    ```python
    examples = fleet_sparse.resumable(dataset)
    for epoch in range(examples.epoch, 10):
        dataset.local_shuffle()
        exe.train_from_dataset(program, examples)
    ```

    If the snapshot has another number of workers, which had other parts of the data, all workers begin at the start of
    the earliest epoch of any of them, and a warning is logged.

    Args:
        loader: Any iterable that can be iterated once per epoch; it may be a `look_ahead`, or `look_ahead` may wrap it.
            Or an `InMemoryDataset` or `QueueDataset`.

    Raises:
        PlanError: This worker has a resumable loader already; a snapshot has one position per worker.
        FleetSparseError: The loader is read before `fleet.init_worker()`.
    """
    return Resumable(loader, active())


class Resumable:
    """An iterable of batches whose position is saved in snapshots. Its length is that of a whole epoch.

    Args:
        loader: The loader of the batches.
        session: The session of this worker.

    Attributes:
        loader: As given.
    """

    def __init__(self, loader: Any, session: Session) -> None:
        session.use_loader(self)
        self.loader = loader
        self._session = session
        self._begins_at: Position | None = None  # of the next pass; None while unknown
        self._yielded: Position | None = None  # after the last yielded batch; None before the first one of a pass
        self._is_trained = False  # True if a step ran in this pass
        self._running: dict[int, Position] = {}  # by thread: after the batch that it runs

    @property
    def epoch(self) -> int:
        """Number of the current pass, between passes of the next one, from 0.

        Raises:
            FleetSparseError: Before `fleet.init_worker()`.
        """
        return self._yielded.epoch if self._yielded is not None else self._next_pass().epoch

    def position_after_step(self) -> Position:
        """Position of the loader once the step that runs now has ended: of the first batch that is not done then.

        Several threads may read the batches of a pass; of a step on a thread that reads none nothing is known.
        """
        running = dict(self._running)
        if len(running) > 1:
            running.pop(threading.get_ident(), None)
            self._is_trained = True
            first = min(running.values())
            return Position(first.epoch, first.batch - 1)
        if self._yielded is None:
            return self._next_pass()
        self._is_trained = True
        return self._yielded

    def __iter__(self) -> Iterator[Any]:
        return self.read_by(iter)

    def read_by(self, reader: Callable[[Iterator[Any]], Iterator[Any]]) -> Iterator[Any]:
        """Yields the batches of `reader`; batches that it read and has not yielded do not count."""
        return self._to_its_end(self.read_from(lambda num_skipped: reader(batches_from(self.loader, num_skipped))))

    def read_from(self, batches_after: Callable[[int], Iterator[Any]]) -> Iterator[Any]:
        """A pass over the batches after the first n, which `batches_after(n)` yields.

        One thread at a time may read it. A thread that reads the next batch has run the one before.
        """
        if self._yielded is not None and self._is_trained:  # the pass before ended early
            self._begins_at = Position(self._yielded.epoch + 1, 0)
        self._yielded, self._is_trained = None, False
        self._running = {}
        return self._pass(batches_after, self._next_pass())

    def note_done(self) -> None:
        """Notes that this thread has run the batch that it read last."""
        self._running.pop(threading.get_ident(), None)

    def __len__(self) -> int:
        """Raises `TypeError` if the loader has no length."""
        return len(self.loader)

    def _pass(self, batches_after: Callable[[int], Iterator[Any]], begin: Position) -> Iterator[Any]:
        for number, batch in enumerate(batches_after(begin.batch), begin.batch + 1):
            self._yielded = self._running[threading.get_ident()] = Position(begin.epoch, number)
            yield batch
        self._begins_at = Position(begin.epoch + 1, 0)
        self._yielded = None
        self.note_done()

    def _to_its_end(self, batches: Iterator[Any]) -> Iterator[Any]:
        yield from batches
        self._session.end_pass()

    def _next_pass(self) -> Position:
        if self._begins_at is None:
            self._begins_at = self._resumed()
        return self._begins_at

    def _resumed(self) -> Position:
        resumed = self._session.resumed
        begin = resumed.position or Position(0, 0)
        if resumed.num_workers and resumed.num_workers != self._session.num_workers:
            logger.warning(
                "snapshot %s has %d workers, this job has %d, so that positions of loaders do not apply. All workers "
                "begin at the start of epoch %d",
                resumed.snapshot,
                resumed.num_workers,
                self._session.num_workers,
                begin.epoch,
            )
        elif resumed.snapshot and resumed.position is None:
            logger.warning(
                "snapshot %s has no position of this worker's loader; it begins at its start",
                resumed.snapshot,
            )
        return begin


def batches_from(loader: Iterable[Any], num_skipped: int) -> Iterator[Any]:
    """The batches of a loader without the first `num_skipped`."""
    if num_skipped == 0:
        return iter(loader)
    skip = getattr(loader, "skip", None)
    return iter(skip(num_skipped)) if callable(skip) else islice(iter(loader), num_skipped, None)
