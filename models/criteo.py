"""Reads the Criteo click logs from a file of the user.

A line of the layout that Criteo Labs published (Display Advertising Challenge 2014, and the terabyte logs) has 40
columns separated by tabs: the label, 13 integers I1 to I13, 26 categories C1 to C26 as hexadecimal text. A column may
be empty. Plain text or gzip.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from . import lines
from .feature_id import feature_ids
from .source import Batch, DataSource

NUM_DENSE = 13
NUM_FIELDS = 26

_LINE = re.compile(rf"[01](\t(-?\d{{1,18}})?){{{NUM_DENSE}}}(\t[0-9a-fA-F]{{0,16}}){{{NUM_FIELDS}}}", re.ASCII)


def source(train: Path, test: Path | None, *, batch_size: int) -> DataSource:
    """The examples of `train`, in the order of the file.

    Without a `test` file, every tenth batch of `train` is held out. Files are read lazily, one batch at a time.
    """
    is_held_out = test is None

    def train_batches(epoch: int, worker_index: int, num_workers: int) -> Iterator[Batch]:
        return map(
            parse,
            lines.train_batches(
                train, batch_size, worker_index=worker_index, num_workers=num_workers, is_held_out=is_held_out
            ),
        )

    def test_batches() -> Iterator[Batch]:
        return map(parse, lines.test_batches(test or train, batch_size, is_held_out=is_held_out))

    return DataSource(
        num_fields=NUM_FIELDS, num_dense=NUM_DENSE, num_batches=None, train=train_batches, test=test_batches
    )


def parse(batch: lines.LineBatch) -> Batch:
    """Parses lines.

    An integer `v` becomes `log(1 + max(v, 0))`, an empty one 0. An empty category is a value like any other.

    Raises:
        ValueError: A line has another layout; the message names file, line and column.
    """
    for index, text in enumerate(batch.texts):
        if not _LINE.fullmatch(text):
            raise batch.error(index, _complaint(text))
    columns = list(zip(*(text.split("\t") for text in batch.texts), strict=True))
    integers = columns[1 : 1 + NUM_DENSE]
    categories = columns[1 + NUM_DENSE :]
    return Batch(
        ids=np.stack([feature_ids(f"C{i}", column) for i, column in enumerate(categories, 1)], axis=1),
        dense=np.stack([_logarithms(column) for column in integers], axis=1),
        label=np.array(columns[0], np.float32)[:, np.newaxis],
    )


def _logarithms(column: tuple[str, ...]) -> NDArray[np.float32]:
    values = np.array([text or "0" for text in column]).astype(np.float64)
    return np.log1p(np.maximum(values, 0)).astype(np.float32)


def _complaint(text: str) -> str:
    """Describes what is wrong with a line that does not match."""
    columns = text.split("\t")
    wanted = 1 + NUM_DENSE + NUM_FIELDS
    if len(columns) != wanted:
        hint = "; a file without labels cannot be trained or tested on" if len(columns) == wanted - 1 else ""
        return f"{len(columns)} columns separated by tabs, should be {wanted} (label, 13 integers, 26 categories){hint}"
    label, *rest = columns
    if label not in ("0", "1"):
        return f"the label is {label!r}, should be 0 or 1"
    for i, value in enumerate(rest[:NUM_DENSE], 1):
        if not re.fullmatch(r"(-?\d{1,18})?", value, re.ASCII):
            return f"I{i} is {value!r}, should be an integer or empty"
    for i, value in enumerate(rest[NUM_DENSE:], 1):
        if not re.fullmatch(r"[0-9a-fA-F]{0,16}", value):
            return f"C{i} is {value!r}, should be up to 16 hexadecimal digits"
    raise AssertionError("the columns match and the line does not")
