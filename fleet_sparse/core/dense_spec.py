"""DenseSpec: dense parameters that lie end to end in one flat float32 array, which is sharded by range."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from .bounds import UNBOUNDED, Bounds
from .decay import Decay
from .placement import EVEN, num_row_shards_of
from .spec import Spec, check_bounds, is_int, is_number, unequal


class Segment(NamedTuple):
    """One parameter inside the flat array.

    Attributes:
        name: Name of the parameter.
        offset: Index of its first value.
        size: Number of its values.
        learning_rate: Factor on the learning rate.
        l1_decay: L1 coefficient of its weight decay. Each segment has its own; the rule has none.
        l2_decay: L2 coefficient of its weight decay.
        clip_min: Lower bound of its gradients.
        clip_max: Upper bound of its gradients.
    """

    name: str
    offset: int
    size: int
    learning_rate: float
    l1_decay: float = 0.0
    l2_decay: float = 0.0
    clip_min: float = UNBOUNDED.low
    clip_max: float = UNBOUNDED.high

    @property
    def decay(self) -> Decay:
        """Weight decay that is added to gradients."""
        return Decay(self.l1_decay, self.l2_decay)

    @property
    def bounds(self) -> Bounds:
        """Bounds that gradients are clipped to before weight decay is added."""
        return Bounds(self.clip_min, self.clip_max)


@dataclass(frozen=True)
class DenseSpec(Spec):
    """Dense parameters of one flat array.

    Attributes:
        segments: The parameters, at least one, in order and without gaps from offset 0.

    Raises:
        ValueError: A field has a value outside of these; the message names the spec.
    """

    kind = "dense"

    segments: tuple[Segment, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        segments = tuple(Segment(*segment) for segment in self.segments)
        if not segments:
            raise ValueError(f"{self.where}: has no segments, should have at least one")
        offset = 0
        for segment in segments:
            self._check(segment)
            if segment.offset != offset:
                raise ValueError(
                    f"{self.where}: segment {segment.name!r} begins at {segment.offset}, should be {offset}"
                )
            offset += segment.size
        self._set("segments", tuple(Segment(*s[:3], *map(float, s[3:])) for s in segments))

    @property
    def num_values(self) -> int:
        """Length of the flat array."""
        last = self.segments[-1]
        return last.offset + last.size

    def range_of(self, shard: int, num_shards: int, placement_version: int = EVEN) -> tuple[int, int]:
        """The values `[begin, end)` that a shard owns. Sizes differ by at most one, and may be 0.

        With a rule that needs whole rows both ends move up to the next end of a segment: a segment is never split.
        Where some shards have rows alone, theirs are `(0, 0)`.
        """
        first = num_row_shards_of(placement_version)
        if shard < first:
            return 0, 0
        return self._cut(shard - first, num_shards - first), self._cut(shard + 1 - first, num_shards - first)

    def differences(self, other: Spec) -> list[str]:
        """Fields in which the two specs disagree, this one's value first; empty if they agree.

        Rule and hyperparameters may differ if one side only reads.
        """
        if not isinstance(other, DenseSpec):
            return [f"kind {self.kind} and {other.kind}"]
        pairs = [("name", self.name, other.name), *self._rule_pairs(other)]
        pairs += [("number of parameters", len(self.segments), len(other.segments))]
        for mine, its in zip(self.segments, other.segments, strict=False):
            fields = zip(Segment._fields, mine, its, strict=True)
            # Offsets follow from the sizes.
            pairs += [(f"parameter {mine.name!r} {_in_words(name)}", a, b) for name, a, b in fields if name != "offset"]
        return unequal(pairs)

    def _check(self, segment: Segment) -> None:
        name, offset, size, *numbers = segment
        if not (isinstance(name, str) and name and is_int(offset) and is_int(size) and size >= 1):
            raise ValueError(f"{self.where}: segment {name!r} at {offset!r} has size {size!r}, should be at least 1")
        for field, number in zip(Segment._fields[3:], numbers, strict=True):
            if not is_number(number):
                raise ValueError(f"{self.where}: segment {name!r} has {_in_words(field)} {number!r}, should be finite")
        check_bounds(f"{self.where}: segment {name!r}", segment.bounds)

    def _cut(self, shard: int, num_shards: int) -> int:
        even = self.num_values * shard // num_shards
        if not self.update_rule.needs_whole_row:
            return even
        return next((segment.offset for segment in self.segments if segment.offset >= even), self.num_values)

    def _fields(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "name": self.name,
            "rule": self.rule,
            "hyperparameters": dict(self.hyperparameters),
            "segments": [_shortened(segment) for segment in self.segments],
        }


def _shortened(segment: Segment) -> list[Any]:
    """The segment as JSON has it: trailing values that change nothing are left out."""
    num_values = 8 if segment.bounds != UNBOUNDED else 6 if any(segment.decay) else 4
    return list(segment[:num_values])


def _in_words(field: str) -> str:
    return field.replace("_", " ")
