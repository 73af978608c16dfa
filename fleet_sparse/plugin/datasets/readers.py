"""Readers: threads that make batches of a data set while the program trains.

Reading, parsing and copying release the interpreter's lock, so that a thread does them as fast as a process would, and
nothing has to be sent to the process that trains.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from fleet_sparse.errors import DatasetError

_Item = TypeVar("_Item")

MAX_WAITING = 4
"""Number of batches that wait for the program, of each thread."""


class _End(NamedTuple):
    error: BaseException | None


class Reader(Generic[_Item]):
    """A thread that iterates, at most `MAX_WAITING` items ahead of its reader.

    Args:
        items: Makes the iterator; runs in the thread.
        timeout_s: Seconds that `next` waits for an item.
        name: Name of the thread.
    """

    def __init__(self, items: Callable[[], Iterator[_Item]], timeout_s: float, name: str) -> None:
        self._items = items
        self._timeout_s = timeout_s
        self._changed = threading.Condition()  # guards all below
        self._waiting: deque[_Item | _End] = deque()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def next(self) -> _Item | None:
        """Returns the next item, or None at the end.

        Raises:
            DatasetError: No item came in time.
            Exception: What the iterator raised.
        """
        until = time.monotonic() + self._timeout_s
        with self._changed:
            while not self._waiting:
                if not self._changed.wait(max(0.0, until - time.monotonic())) and time.monotonic() >= until:
                    raise DatasetError(
                        f"dataset: no batch for {self._timeout_s:g} s. Look for a file system that does not answer or "
                        "a slow pipe_command, or set FLEET_SPARSE_PIPE_S higher",
                        path="",
                    )
            item = self._waiting[0]
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return None
            self._waiting.popleft()
            self._changed.notify_all()
            return item

    def close(self) -> None:
        """Ends the thread at its next item. A second call does nothing."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def join(self) -> None:
        """Waits a moment for the thread to end."""
        self._thread.join(1.0)

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            for item in self._items():
                if not self._put(item):
                    return
        except BaseException as raised:  # the thread that trains raises it
            error = raised
        with self._changed:
            self._waiting.append(_End(error))
            self._changed.notify_all()

    def _put(self, item: _Item) -> bool:
        with self._changed:
            while len(self._waiting) >= MAX_WAITING and not self._is_closed:
                self._changed.wait()
            self._waiting.append(item)
            self._changed.notify_all()
            return not self._is_closed


def in_turns(
    sources: Sequence[Callable[[], Iterator[_Item]]], timeout_s: float, end: Callable[[], None]
) -> Generator[_Item, None, None]:
    """Yields the items of all sources, one of each in turn, each source in a thread of its own.

    The order depends on the items alone, not on which thread is faster. Closing the generator ends the threads.

    Args:
        sources: Make the iterators.
        timeout_s: Seconds that an item is waited for.
        end: Called first when the generator ends, to wake threads that wait for something.
    """
    readers: list[Reader[_Item]] = []
    with contextlib.ExitStack() as stack:
        for number, source in enumerate(sources):
            readers.append(Reader(source, timeout_s, f"fleet_sparse-dataset-{number}"))
            stack.callback(readers[-1].join)
        for reader in readers:
            stack.callback(reader.close)
        stack.callback(end)
        left = list(readers)
        while left:
            for reader in list(left):
                item = reader.next()
                if item is None:
                    left.remove(reader)
                else:
                    yield item
