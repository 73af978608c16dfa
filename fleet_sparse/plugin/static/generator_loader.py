"""`paddle.io.DataLoader.from_generator`, which Paddle 3 removed: batches for loops, and for programs that read them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
from paddle.base import core
from paddle.base.libpaddle import pir

from fleet_sparse.errors import PlanError

Reader = Callable[[], Iterable[Any]]


class GeneratorLoader:
    """Iterates over the batches of a generator function; each iteration calls the function again.

    Args:
        feed_list: The inputs of the program, in the order of the values of a sample.
        return_list: Yields lists of arrays in place of a list with one feed.
    """

    def __init__(self, feed_list: Sequence[Any], *, return_list: bool) -> None:
        self._inputs = [(str(value.name), np.dtype(str(value.dtype).removeprefix("paddle."))) for value in feed_list]
        self._shapes = [tuple(value.shape) for value in feed_list]
        self._return_list = return_list
        self._batches: Reader | None = None

    def set_sample_generator(
        self, reader: Reader, batch_size: int, drop_last: bool = True, places: Any = None
    ) -> GeneratorLoader:
        """Reads single samples, tuples of one value for each input."""

        def batches() -> Iterator[Any]:
            samples = iter(reader())
            while batch := list(islice(samples, batch_size)):
                if len(batch) == batch_size or not drop_last:
                    yield batch

        return self.set_sample_list_generator(batches)

    def set_sample_list_generator(self, reader: Reader, places: Any = None) -> GeneratorLoader:
        """Reads batches as lists of samples."""
        return self.set_batch_generator(lambda: (zip(*samples, strict=True) for samples in reader()))

    def set_batch_generator(self, reader: Reader, places: Any = None) -> GeneratorLoader:
        """Reads batches as one array for each input."""
        self._batches = reader
        return self

    def __call__(self) -> Iterator[Any]:
        return iter(self)

    def __iter__(self) -> Iterator[Any]:
        if self._batches is None:
            raise PlanError("DataLoader.from_generator: has no generator. Call set_batch_generator(reader)")
        return self._feeds(self._batches)

    def _feeds(self, batches: Reader) -> Iterator[Any]:
        for batch in batches():
            arrays = [self._array(index, column) for index, column in enumerate(batch)]
            names = (name for name, _ in self._inputs)
            yield arrays if self._return_list else [dict(zip(names, arrays, strict=True))]

    def _array(self, index: int, column: Any) -> np.ndarray[Any, Any]:
        array = np.asarray(column if hasattr(column, "__array__") else list(column), self._inputs[index][1])
        shape = self._shapes[index]
        return array.reshape(-1, *shape[1:]) if len(shape) > 1 and -1 not in shape[1:] else array


_started: list[ProgramLoader] = []


class ProgramLoader(GeneratorLoader):
    """Feeds its batches to programs that have its inputs, one for each run without a feed, from `start` to `reset`.

    Args:
        feed_list: The inputs of the program, in the order of the values of a sample.
    """

    def __init__(self, feed_list: Sequence[Any]) -> None:
        super().__init__(feed_list, return_list=False)
        self._rest: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        raise PlanError(
            "DataLoader.from_generator: a loader with iterable=False is iterated over. Call loader.start() and "
            "exe.run(program, fetch_list=[...]) until it raises paddle.base.core.EOFException, or write iterable=True"
        )

    @property
    def names(self) -> frozenset[str]:
        """Names of the inputs."""
        return frozenset(name for name, _ in self._inputs)

    def start(self) -> None:
        """Begins to read.

        Raises:
            PlanError: There is no generator, or the loader was started before.
        """
        if self in _started:
            raise PlanError("DataLoader.start: was called before. Call loader.reset() first")
        self._rest = super().__iter__()
        _started.append(self)

    def reset(self) -> None:
        """Ends reading; `start` begins from the first batch again."""
        if self in _started:
            _started.remove(self)

    def next_feed(self) -> dict[str, Any]:
        """Returns the feed of the next run.

        Raises:
            core.EOFException: There are no more batches.
        """
        batch = next(self._rest, None)
        if batch is None:
            raise core.EOFException("DataLoader: there are no more batches. Call loader.reset()")
        return dict(batch[0])


def feed_of(program: pir.Program) -> dict[str, Any] | None:
    """Returns the next batch of the loaders that were started and whose inputs a program has; None if there are none.

    Raises:
        core.EOFException: A loader has no more batches.
    """
    if not _started:
        return None
    data = (op for op in program.global_block().ops if op.name() == "pd_op.data")
    inputs = {op.str_attr("name") for op in data}
    loaders = [loader for loader in _started if loader.names <= inputs]
    return {name: array for loader in loaders for name, array in loader.next_feed().items()} if loaders else None


def from_generator(
    feed_list: Sequence[Any] | None = None,
    capacity: int | None = None,
    use_double_buffer: bool = True,
    iterable: bool = True,
    return_list: bool = False,
    use_multiprocess: bool = False,
    drop_last: bool = True,
) -> GeneratorLoader:
    """Returns a loader over a generator that is given next; batches are made when they are asked for.

    With `iterable=False` programs read it between `start()` and `reset()`, in runs without a feed.

    Raises:
        PlanError: The inputs are not given.
    """
    if not feed_list:
        raise PlanError("DataLoader.from_generator: feed_list is missing, should be the inputs of the program")
    return GeneratorLoader(feed_list, return_list=return_list) if iterable else ProgramLoader(feed_list)
