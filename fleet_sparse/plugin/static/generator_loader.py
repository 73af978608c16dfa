"""`paddle.io.DataLoader.from_generator`, which Paddle 3 removed, for loops of `exe.run(feed=batch)`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

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
        for batch in self._batches():
            arrays = [self._array(index, column) for index, column in enumerate(batch)]
            names = (name for name, _ in self._inputs)
            yield arrays if self._return_list else [dict(zip(names, arrays, strict=True))]

    def _array(self, index: int, column: Any) -> np.ndarray[Any, Any]:
        array = np.asarray(column if hasattr(column, "__array__") else list(column), self._inputs[index][1])
        shape = self._shapes[index]
        return array.reshape(-1, *shape[1:]) if len(shape) > 1 and -1 not in shape[1:] else array


def from_generator(
    feed_list: Sequence[Any] | None = None,
    capacity: int | None = None,
    use_double_buffer: bool = True,
    iterable: bool = True,
    return_list: bool = False,
    use_multiprocess: bool = False,
    drop_last: bool = True,
) -> GeneratorLoader:
    """A loader over a generator that is given next; batches are made when they are asked for.

    Raises:
        PlanError: `iterable` is False, or the inputs are not given.
    """
    if not iterable:
        raise PlanError(
            "DataLoader.from_generator: iterable is False, should be True. Read it in a loop: for batch in loader(): "
            "exe.run(program, feed=batch, fetch_list=[...])"
        )
    if not feed_list:
        raise PlanError("DataLoader.from_generator: feed_list is missing, should be the inputs of the program")
    return GeneratorLoader(feed_list, return_list=return_list)
