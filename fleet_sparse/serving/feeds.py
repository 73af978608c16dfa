"""Checks of the feed of a prediction, before anything is asked of a pserver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .model import ServedModel, Tensor

_ID_KINDS, _NUMBER_KINDS = "iu", "biuf"


def checked_feed(model: ServedModel, feed: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Returns the inputs of a model as contiguous arrays of its dtypes.

    Raises:
        ValueError: An input is missing or unknown, has another kind of numbers or another shape, differs from the
            others in its number of examples, has an id outside of its table, or has lengths that do not fit the ids
            of a field. The message names it.
    """
    wanted = {each.name: each for each in model.feeds}
    if unknown := [name for name in feed if name not in wanted]:
        raise ValueError(f"feed {unknown[0]!r}: the model has no such input; it has {', '.join(wanted)}")
    arrays: dict[str, NDArray[Any]] = {}
    sizes: dict[str, int] = {}
    for name, tensor in wanted.items():
        if name not in feed:
            raise ValueError(f"feed {name!r}: is missing, should have shape {tensor.shape} and dtype {tensor.dtype}")
        arrays[name] = _array_of(tensor, feed[name])
        if tensor.shape and tensor.shape[0] == -1 and name not in model.ragged:
            sizes[name] = len(arrays[name])
    if len(set(sizes.values())) > 1:
        raise ValueError(f"feed: numbers of examples differ: {', '.join(f'{name} {n}' for name, n in sizes.items())}")
    for lookup in model.lookups:
        if lookup.feed is not None and lookup.size is not None:
            check_bounds(f"feed {lookup.feed!r}", arrays[lookup.feed], lookup.size)
    for each in model.lengths:
        _check_lengths(
            each.feed, arrays[each.feed].reshape(-1), each.of, arrays[each.of].shape, is_ragged=each.of in model.ragged
        )
    return arrays


def _array_of(tensor: Tensor, value: Any) -> NDArray[Any]:
    """Returns an input as a contiguous array of its dtype, after checking its numbers and its shape."""
    where, dtype = f"feed {tensor.name!r}", np.dtype(tensor.dtype)
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ValueError(
            f"{where}: is no array of {dtype} with shape {tensor.shape}, -1 for any size: {error}"
        ) from error
    if dtype.kind in _ID_KINDS and array.dtype.kind not in _ID_KINDS:
        raise ValueError(f"{where}: is {array.dtype}, should be {dtype}; ids and counts are whole numbers")
    if array.dtype.kind not in _NUMBER_KINDS:
        raise ValueError(f"{where}: is {array.dtype}, should be {dtype} or other real numbers")
    if array.ndim != len(tensor.shape) or any(
        size not in (-1, got) for size, got in zip(tensor.shape, array.shape, strict=True)
    ):
        raise ValueError(f"{where}: has shape {array.shape}, should have {tensor.shape}, -1 for any size")
    if dtype.kind in _ID_KINDS and array.size and not np.can_cast(array.dtype, dtype):
        limits = np.iinfo(dtype)
        for extreme in (int(array.min()), int(array.max())):
            if not limits.min <= extreme <= limits.max:
                raise ValueError(f"{where}: has {extreme}, which is no {dtype}")
    return np.ascontiguousarray(array, dtype)


def _check_lengths(feed: str, lengths: NDArray[Any], of: str, shape: tuple[int, ...], *, is_ragged: bool) -> None:
    """Checks the number of ids of each example against the shape of the ids, or of their weights."""
    if not is_ragged:
        outside = lengths[(lengths < 0) | (lengths > shape[1])]
        if outside.size:
            raise ValueError(f"feed {feed!r}: has {outside[0]}, should be 0 to {shape[1]}: {of!r} has shape {shape}")
        return
    if lengths.size and lengths.min() < 0:
        raise ValueError(f"feed {feed!r}: has {lengths.min()}, should be 0 or more: {of!r} has shape {shape}")
    if (total := int(lengths.sum(dtype=np.int64))) != shape[0]:
        raise ValueError(f"feed {feed!r}: adds up to {total}, should be {shape[0]}: {of!r} has shape {shape}")


def check_bounds(where: str, ids: NDArray[Any], size: int) -> None:
    """Raises ValueError if an id is not in `[0, size)`."""
    outside = ids[(ids < 0) | (ids >= size)]
    if outside.size:
        raise ValueError(f"{where}: has id {outside.flat[0]}, ids should be 0 to {size - 1}")
