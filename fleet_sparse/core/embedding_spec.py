"""EmbeddingSpec: what an embedding declares of its table, in the static graph and in dygraph alike."""

from __future__ import annotations

from dataclasses import dataclass

from .decay import Decay
from .entries import Entry
from .initializer import Initializer


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingSpec:
    """An embedding as the user declares it. Embeddings of one name share one table.

    The update rule is not part of it: it comes with the optimizer.

    Attributes:
        name: Name of the table.
        dim: Floats of a row.
        initializer: First value of a row.
        seed: Seed of the initializer; 0 for the job's seed.
        size: Number of distinct ids that the user promises; None if the embedding states none.
        is_bounded: True if ids must lie in `[0, size)`.
        learning_rate: Multiplier of the optimizer's learning rate.
        is_trainable: False if the rows keep their first values.
        decay: The embedding's own weight decay; None for the optimizer's.
        need_clip: True if the optimizer's gradient clip includes the table.
        entry: Which ids get a row; None for all that are trained.
        show_click: Names of the inputs that hold shows and clicks of each example; None if the entry reads neither.
        has_show_click: True if the first two values of a row are its shows and clicks, as of `TableSpec`.
    """

    name: str
    dim: int
    initializer: Initializer
    seed: int = 0
    size: int | None = None
    is_bounded: bool = False
    learning_rate: float = 1.0
    is_trainable: bool = True
    decay: Decay | None = None
    need_clip: bool = True
    entry: Entry | None = None
    show_click: tuple[str, str] | None = None
    has_show_click: bool = False

    @property
    def max_ids(self) -> int | None:
        """Number of distinct ids that the table may hold; None without a promise, or if the ids are bounded."""
        return None if self.is_bounded else self.size
