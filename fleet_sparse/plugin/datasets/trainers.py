"""Threads that share the items of one iterator, as the threads that train share the batches of a data set."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

_Item = TypeVar("_Item")

_END = object()

Work = Callable[[_Item], None]
"""Works on one item; each function runs on one thread."""


def share_out(
    items: Iterator[_Item], works: Sequence[Work[_Item]], end: Callable[[], None], done: Callable[[], None]
) -> None:
    """Gives every item to one of `works`, each on a thread of its own, the first one on the calling thread.

    The first item is done before others begin. After an error no item is begun, and it is raised once all threads have
    ended.

    Args:
        items: The items. One thread at a time iterates them.
        works: What is done with an item.
        end: Called after an error, to end a wait for the next item.
        done: Called by a thread after each item that it has worked on.
    """
    first, *others = works
    for item in items:
        first(item)
        done()
        if others:
            break
    else:
        return
    sharing = _Sharing(items, end, done)
    threads = [
        threading.Thread(target=sharing.run, args=(work,), name=f"fleet_sparse-train-{number}", daemon=True)
        for number, work in enumerate(others, start=1)
    ]
    try:
        for thread in threads:
            thread.start()
        sharing.run(first)
        for thread in threads:
            thread.join()
    except BaseException as error:  # Ctrl-C
        sharing.fail(error)
        raise
    finally:
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if sharing.error is not None:
        raise sharing.error


class _Sharing(Generic[_Item]):
    """Items that several threads work on."""

    def __init__(self, items: Iterator[_Item], end: Callable[[], None], done: Callable[[], None]) -> None:
        self._items = items
        self._end = end
        self._done = done
        self._taking = threading.Lock()  # guards `_items`
        self._failing = threading.Lock()  # guards `error`
        self.error: BaseException | None = None

    def run(self, work: Work[_Item]) -> None:
        """Works on items until there are none, or one failed."""
        try:
            while True:
                with self._taking:
                    if self.error is not None:
                        return
                    item = next(self._items, _END)
                if item is _END:
                    return
                work(item)  # type: ignore[arg-type]  # not _END
                self._done()
        except BaseException as error:  # also SystemExit, which would end this thread alone
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Notes an error, of which the first one is raised."""
        with self._failing:
            is_first = self.error is None
            if is_first:
                self.error = error
        if is_first:
            self._end()
