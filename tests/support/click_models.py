"""Small click models in plain Paddle, for tests of the zoo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

NUM_FIELDS, NUM_DENSE, DIM = 5, 3, 4
HIDDEN = (6, 5)
NUM_IDS = 40


class BuiltModel(NamedTuple):
    """A small model in plain Paddle, with values in its tables, and examples for it."""

    run: Callable[..., list[Any]]
    """`run(program, *values)` returns the values on the examples."""
    main: Any
    loss: Any
    logits: Any
    evaluation: Any
    evaluation_logits: Any
    parameters: Callable[[], dict[str, Any]]
    feed: dict[str, Any]
