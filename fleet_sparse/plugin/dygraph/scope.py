"""ParameterScope: parameters and accumulators of dygraph by name, read and written like those in a Paddle scope."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class ParameterScope:
    """Has the one method of `paddle.static.Scope` that dense synchronization needs."""

    def __init__(self) -> None:
        self._tensors: dict[str, Any] = {}

    def add(self, tensors: Iterable[Any]) -> None:
        """Adds tensors by their names."""
        self._tensors.update({tensor.name: tensor for tensor in tensors})

    def remove(self, name: str) -> None:
        """Removes the tensor `name`, if it is there."""
        self._tensors.pop(name, None)

    def find_var(self, name: str) -> Any:
        """Returns the tensor `name`, whose `get_tensor()` is its memory; None if there is none."""
        return self._tensors.get(name)
