"""Slots: the inputs that a data set was given as `use_var`, in the order of the text."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from fleet_sparse.errors import PlanError


class Slot(NamedTuple):
    """One input of a data set.

    Attributes:
        name: Name of the input.
        is_float: True for float32, False for int64.
        shape: Shape of one line's values; -1 for the dimension that the longest line of a batch decides.
    """

    name: str
    is_float: bool
    shape: tuple[int, ...]

    @property
    def dtype(self) -> type:
        """The dtype of the values."""
        return np.float32 if self.is_float else np.int64

    @property
    def multiple(self) -> int:
        """Number of values of a line, or what it is a multiple of."""
        return prod(size for size in self.shape if size >= 0)

    @property
    def is_padded(self) -> bool:
        """True if short lines are padded."""
        return -1 in self.shape


def read_slots(desc: Any) -> tuple[Slot, ...]:
    """Returns the slots of a data set by its `proto_desc`.

    Raises:
        PlanError: There are none, two have one name, or a shape has more than one unknown dimension after the first.
    """
    slots = tuple(
        Slot(slot.name, slot.type.startswith("float"), tuple(slot.shape)[1:]) for slot in desc.multi_slot_desc.slots
    )
    if not slots:
        raise PlanError("dataset: it has no inputs. Call dataset.init(use_var=[...]) first")
    names = [slot.name for slot in slots]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise PlanError(f"dataset: use_var has {twice!r} twice, should have it once. Call dataset.init once")
    for slot in slots:
        if slot.shape.count(-1) > 1:
            raise PlanError(
                f"dataset: input {slot.name!r} has shape {[-1, *slot.shape]}, should have at most one unknown "
                "dimension after the first, that of the longest line"
            )
        if 0 in slot.shape:
            raise PlanError(
                f"dataset: input {slot.name!r} has shape {[-1, *slot.shape]}, should have no dimension of 0"
            )
    return slots


def lengths_name(slot: str) -> str:
    """Name of the input that holds the number of values of each line of a slot, if a program has it."""
    return f"{slot}.lengths"


def multiples_of(slots: Sequence[Slot]) -> Any:
    """The counts of each slot must be multiples of these."""
    return np.array([slot.multiple for slot in slots], np.int64)
