"""Reads PaddleRec's slot text, the input of its queue-dataset readers for click models.

A line is an example, with tokens `slot:feasign` separated by spaces, in any order, as in

    click:0 dense_feature:0.05 dense_feature:0.00663 ... 1:715353 2:817085 ... 26:851920

`click` is the label. `dense_feature` occurs once for each dense value, in order. Every other slot is a field, and its
feasign is the id, a signed or unsigned integer of 64 bits. As in PaddleRec's readers, unknown slots are ignored, a
missing field has feasign 0, and a missing `dense_feature` is all zeros. A field has one id per example.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from . import lines
from .source import Batch, DataSource

LABEL = "click"
DENSE = "dense_feature"

CRITEO_SLOTS = tuple(str(slot) for slot in range(1, 27))
CRITEO_NUM_DENSE = 13

ABSENT = 0
"""The feasign of a missing field."""


def source(train: Path, test: Path | None, *, slots: Sequence[str], num_dense: int, batch_size: int) -> DataSource:
    """The examples of `train`, in the order of the file, with a field for each of `slots`.

    Without a `test` file, every tenth batch of `train` is held out. Files are read lazily, one batch at a time.
    """
    is_held_out = test is None
    column_of = {slot: column for column, slot in enumerate(slots)}
    if len(column_of) < len(slots) or {LABEL, DENSE} & column_of.keys():
        raise ValueError(f"slots: {','.join(slots)} should be distinct, and neither {LABEL} nor {DENSE}")

    def train_batches(epoch: int, worker_index: int, num_workers: int) -> Iterator[Batch]:
        share = lines.train_batches(
            train, batch_size, worker_index=worker_index, num_workers=num_workers, is_held_out=is_held_out
        )
        return (parse(batch, column_of, num_dense) for batch in share)

    def test_batches() -> Iterator[Batch]:
        held_out = lines.test_batches(test or train, batch_size, is_held_out=is_held_out)
        return (parse(batch, column_of, num_dense) for batch in held_out)

    return DataSource(
        num_fields=len(slots), num_dense=num_dense, num_batches=None, train=train_batches, test=test_batches
    )


def parse(batch: lines.LineBatch, column_of: Mapping[str, int], num_dense: int) -> Batch:
    """Parses lines.

    Args:
        batch: The lines.
        column_of: Column of ids of each slot.
        num_dense: Number of values of `dense_feature`.

    Raises:
        ValueError: A line has another layout; the message names file, line and token.
    """
    ids = np.full((len(batch.texts), len(column_of)), ABSENT, np.int64)
    dense = np.zeros((len(batch.texts), num_dense), np.float32)
    label = np.zeros((len(batch.texts), 1), np.float32)
    for index, text in enumerate(batch.texts):  # a Python loop, because text has no array interface
        try:
            click, values, feasigns = _parse_line(text, column_of)
        except ValueError as error:
            raise batch.error(index, str(error)) from None
        if len(values) not in (0, num_dense):
            raise batch.error(index, f"{len(values)} values of {DENSE}, should be {num_dense} or none")
        label[index] = click
        dense[index, : len(values)] = values
        for column, feasign in feasigns.items():
            ids[index, column] = feasign
    return Batch(ids, dense, label)


def _parse_line(text: str, column_of: Mapping[str, int]) -> tuple[int, list[float], dict[int, int]]:
    """Parses one line: label, dense values, and ids by column."""
    click: int | None = None
    values: list[float] = []
    feasigns: dict[int, int] = {}
    for token in text.split():
        slot, colon, value = token.partition(":")
        if not colon:
            raise ValueError(f"{token!r} should be slot:feasign")
        if slot == LABEL:
            if value not in ("0", "1") or click is not None:
                raise ValueError(f"{token!r} should be {LABEL}:0 or {LABEL}:1, once")
            click = int(value)
        elif slot == DENSE:
            values.append(_finite(token, value))
        elif (column := column_of.get(slot)) is not None:
            if column in feasigns:
                raise ValueError(f"{token!r} is the second feasign of slot {slot!r}, should be one")
            feasigns[column] = _signed(token, value)
    if click is None:
        raise ValueError(f"no label, should have {LABEL}:0 or {LABEL}:1")
    return click, values, feasigns


def _finite(token: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"{token!r} should be a number") from None
    if not abs(number) <= np.finfo(np.float32).max:
        raise ValueError(f"{token!r} should be a finite number")
    return number


def _signed(token: str, value: str) -> int:
    """Returns the feasign as the int64 with the same 64 bits."""
    try:
        feasign = int(value)
    except ValueError:
        raise ValueError(f"{token!r} should have an integer") from None
    if not -(1 << 63) <= feasign < 1 << 64:
        raise ValueError(f"{token!r} does not fit 64 bits")
    return feasign - (1 << 64) if feasign >= 1 << 63 else feasign
