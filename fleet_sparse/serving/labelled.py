"""Labelled examples, and what a model predicts for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.errors import SettingError

from .model import ServedModel
from .npz_file import read_npz

_BATCH_SIZE = 4096
_MIN_OF_A_KIND = 2

Predict = Callable[[Mapping[str, NDArray[Any]]], Mapping[str, NDArray[Any]]]
"""Returns the outputs of a model by name."""


class LabelledExamples(NamedTuple):
    """Inputs of a model with their labels."""

    origin: str
    feed: dict[str, NDArray[Any]]
    labels: NDArray[np.bool_]
    """`(n,)`."""


def read_labelled(path: Path, label: str) -> LabelledExamples:
    """Reads examples.

    Args:
        path: A file of `numpy.savez` with the inputs and the labels.
        label: Name of the array of the labels.

    Raises:
        SettingError: The file cannot be read, has no such array, or the labels are not 0 and 1, with two examples of
            either.
    """
    feed = read_npz(path)
    if label not in feed:
        raise SettingError(
            f"{path}: has no array {label!r} with the labels; it has {', '.join(feed) or 'none'}. Name it with --label"
        )
    labels = feed.pop(label)
    flat = labels.reshape(-1)
    if labels.ndim < 1 or len(labels) != len(flat):
        raise SettingError(f"{path}: array {label!r} has shape {labels.shape}, should have one label for each example")
    if flat.dtype.kind not in "biuf" or not ((flat == 0) | (flat == 1)).all():
        raise SettingError(f"{path}: array {label!r} has other values than 0 and 1")
    is_positive = flat.astype(np.bool_)
    num_positives = int(is_positive.sum())
    if min(num_positives, len(flat) - num_positives) < _MIN_OF_A_KIND:
        raise SettingError(
            f"{path}: array {label!r} has {num_positives} labels 1 and {len(flat) - num_positives} labels 0, should "
            f"have {_MIN_OF_A_KIND} or more of either"
        )
    return LabelledExamples(str(path), feed, is_positive)


def target_of(model: ServedModel, target: str | None) -> str:
    """Returns the name of the target with the predictions.

    Args:
        model: The model.
        target: The name that was given; None for the only one.

    Raises:
        SettingError: There is no such target, or none was given and there are several.
    """
    names = [each.name for each in model.targets]
    if target is None and len(names) == 1:
        return names[0]
    if target not in names:
        what = "is not given" if target is None else f"is {target!r}"
        raise SettingError(f"--target: {what}, should be one of {', '.join(map(repr, names))}")
    return target


def predictions(
    model: ServedModel, predict: Predict, examples: LabelledExamples, target: str
) -> NDArray[np.floating[Any]]:
    """Returns the predictions of all examples, `(n,)`.

    Raises:
        SettingError: An input is wrong, or the target has not one value for each example.
    """
    num_examples = len(examples.labels)
    is_sliced = {each.name for each in model.feeds if each.shape and each.shape[0] == -1} - set(model.ragged)
    for name in is_sliced & examples.feed.keys():
        if (found := examples.feed[name].shape[:1]) != (num_examples,):
            raise SettingError(
                f"{examples.origin}: input {name!r} has {found[0] if found else 0} examples, there are {num_examples} "
                "labels"
            )
    ends_of_ids = {
        each.of: np.append(0, np.cumsum(examples.feed[each.feed]))
        for each in model.lengths
        if each.of in model.ragged and each.feed in examples.feed and examples.feed[each.feed].dtype.kind in "iu"
    }
    is_whole = any(name not in ends_of_ids for name in model.ragged)  # the number of ids of an example is computed
    batch_size = num_examples if is_whole else _BATCH_SIZE
    parts = []
    for begin in range(0, num_examples, batch_size):
        end = min(begin + batch_size, num_examples)
        feed = {name: each[begin:end] if name in is_sliced else each for name, each in examples.feed.items()}
        if not is_whole:
            # The last batch has what is left, so that ids without an example are noticed.
            feed |= {
                name: examples.feed[name][ends[begin] : ends[end] if end < num_examples else None]
                for name, ends in ends_of_ids.items()
                if name in feed
            }
        try:
            found_part = predict(feed)[target]
        except ValueError as error:
            raise SettingError(f"{examples.origin}: {error}") from error
        if found_part.size != end - begin:
            raise SettingError(
                f"--target: {target!r} has shape {found_part.shape} for {end - begin} examples, should have one "
                "prediction for each"
            )
        parts.append(found_part.reshape(-1))
    return np.concatenate(parts)
