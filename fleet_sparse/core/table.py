"""TableSpec and DenseSpec: what both sides of a job must agree on about a table, and the JSON they travel in."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import xxhash

from .bounds import UNBOUNDED, Bounds
from .decay import Decay
from .ids import table_id, table_salt
from .initializer import FLOAT32_MAX, Initializer, checked
from .rules import RULES, UpdateRule, read_only

MAX_DIM = 65535
# Hyperparameters that every rule has: they change the gradient before the rule sees it. These values, which change
# nothing, are left out.
_DECAY = {"l1_decay": 0.0, "l2_decay": 0.0}
_BOUNDS = {"clip_min": UNBOUNDED.low, "clip_max": UNBOUNDED.high}
_OF_EVERY_RULE = _DECAY | _BOUNDS
NAME_PATTERN = r"[A-Za-z0-9_.@/-]{1,128}"


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSpec:
    """A table: everything that decides its values.

    Attributes:
        name: 1 to 128 of `A-Z a-z 0-9 _ . @ / -`.
        dim: Floats of a row, 1 to 65535.
        rule: A key of `RULES`.
        hyperparameters: (name, value) of each hyperparameter of the rule; those left out are filled in with the rule's
            defaults, and all are sorted by name. `l1_decay`, `l2_decay`, `clip_min` and `clip_max` go with every rule;
            they are left out if they change nothing.
        initializer: First value of a row.
        seed: Of the initializer, in `[0, 2^64)`.
        dtype: Of a row; "float32".
        max_ids: How many distinct ids the user promised, or None. No part of what two sides must agree on.

    Raises:
        ValueError: One of the above does not hold; the message names the table.
    """

    name: str
    dim: int
    rule: str
    hyperparameters: tuple[tuple[str, float], ...] = ()
    initializer: Initializer
    seed: int = 0
    dtype: str = "float32"
    max_ids: int | None = None

    def __post_init__(self) -> None:
        where = _named("table", self.name)
        if not _is_int(self.dim) or not 1 <= self.dim <= MAX_DIM:
            raise ValueError(f"{where}: dim is {self.dim!r}, should be 1 to {MAX_DIM}")
        if self.dtype != "float32":
            raise ValueError(f"{where}: dtype is {self.dtype!r}, should be 'float32', the only one there is")
        if not _is_int(self.seed) or not 0 <= self.seed < 1 << 64:
            raise ValueError(f"{where}: seed is {self.seed!r}, should be 0 to 2^64 - 1")
        if self.max_ids is not None and (not _is_int(self.max_ids) or self.max_ids < 1):
            raise ValueError(f"{where}: max_ids is {self.max_ids!r}, should be None or at least 1")
        _set(self, "hyperparameters", _complete(where, self.rule, self.hyperparameters, _OF_EVERY_RULE))
        _check_bounds(where, self.bounds)
        try:
            _set(self, "initializer", checked(Initializer(*self.initializer)))
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{where}: {error}") from None

    @property
    def table_id(self) -> int:
        """The 32 bits that stand for the table on the wire."""
        return table_id(self.name)

    @property
    def salt(self) -> int:
        """What the table's ids are combined with before they are hashed."""
        return table_salt(self.name)

    @property
    def update_rule(self) -> UpdateRule:
        """The rule that `rule` names."""
        return RULES[self.rule]

    @property
    def decay(self) -> Decay:
        """What is added to gradients."""
        hyperparameters = _OF_EVERY_RULE | dict(self.hyperparameters)
        return Decay(*(hyperparameters[name] for name in _DECAY))

    @property
    def bounds(self) -> Bounds:
        """What gradients are clipped to before that."""
        hyperparameters = _OF_EVERY_RULE | dict(self.hyperparameters)
        return Bounds(*(hyperparameters[name] for name in _BOUNDS))

    @property
    def schema_hash(self) -> int:
        """64 bits of everything but `max_ids`: equal on two sides only if they mean the same table."""
        return _hash_of({name: value for name, value in self._fields().items() if name != "max_ids"})

    def to_json(self) -> str:
        """The spec as canonical JSON; `parse_spec` reads it."""
        return _canonical(self._fields())

    def differences(self, other: TableSpec | DenseSpec) -> list[str]:
        """What the two disagree about, as `dim 8 and 16`, this one's value first; empty if they may meet.

        `max_ids` may differ. Rule and hyperparameters may too, when one side only reads.
        """
        if not isinstance(other, TableSpec):
            return ["kind table and dense"]
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in ("name", "dim", "dtype")]
        pairs += _rule_pairs(self, other)
        pairs += [("initializer", self.initializer, other.initializer), ("seed", self.seed, other.seed)]
        return [f"{name} {mine} and {its}" for name, mine, its in pairs if mine != its]

    def _fields(self) -> dict[str, Any]:
        return {
            "kind": "table",
            "name": self.name,
            "dim": self.dim,
            "dtype": self.dtype,
            "rule": self.rule,
            "hyperparameters": dict(self.hyperparameters),
            "initializer": list(self.initializer),
            "seed": self.seed,
            "max_ids": self.max_ids,
        }


class Segment(NamedTuple):
    """One parameter inside a flat dense array.

    Attributes:
        name: The parameter's.
        offset: Index of its first value.
        size: Number of its values.
        learning_rate: What its learning rate is multiplied with.
        l1_decay: Of its weight decay, which is its own, not the rule's.
        l2_decay: As `l1_decay`.
        clip_min: Least value of its gradients, which is its own as well.
        clip_max: Largest one.
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
        """What is added to gradients."""
        return Decay(self.l1_decay, self.l2_decay)

    @property
    def bounds(self) -> Bounds:
        """What gradients are clipped to before that."""
        return Bounds(self.clip_min, self.clip_max)


@dataclass(frozen=True)
class DenseSpec:
    """Dense parameters, laid end to end in one flat float32 array that is sharded by range.

    Attributes:
        name: As a table's.
        rule: A key of `RULES`.
        hyperparameters: As a table's.
        segments: The parameters, in order, without gaps from offset 0.

    Raises:
        ValueError: One of the above does not hold; the message names the spec.
    """

    name: str
    rule: str
    hyperparameters: tuple[tuple[str, float], ...]
    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        where = _named("dense", self.name)
        _set(self, "hyperparameters", _complete(where, self.rule, self.hyperparameters, {}))
        segments = tuple(Segment(*segment) for segment in self.segments)
        if not segments:
            raise ValueError(f"{where}: has no segments, should have at least one")
        for name, offset, size, *numbers in segments:
            if not (isinstance(name, str) and name and _is_int(offset) and _is_int(size) and size >= 1):
                raise ValueError(f"{where}: segment {name!r} at {offset!r} has size {size!r}, should be at least 1")
            for field, number in zip(Segment._fields[3:], numbers, strict=True):
                if not _is_number(number):
                    what = field.replace("_", " ")
                    raise ValueError(f"{where}: segment {name!r} has {what} {number!r}, should be finite")
            _check_bounds(f"{where}: segment {name!r}", Bounds(*numbers[-2:]))
        ends = list(accumulate(segment.size for segment in segments))
        for segment, expected in zip(segments, [0, *ends], strict=False):
            if segment.offset != expected:
                raise ValueError(f"{where}: segment {segment.name!r} begins at {segment.offset}, should be {expected}")
        _set(self, "segments", tuple(Segment(*s[:3], *map(float, s[3:])) for s in segments))

    @property
    def num_values(self) -> int:
        """Length of the flat array."""
        last = self.segments[-1]
        return last.offset + last.size

    def range_of(self, shard: int, num_shards: int) -> tuple[int, int]:
        """The values `[begin, end)` that a shard owns; sizes differ by at most one, and may be 0.

        With a rule that needs whole rows the ends are those of segments, the next ones: a segment is never split.
        """
        return self._cut(shard, num_shards), self._cut(shard + 1, num_shards)

    def _cut(self, shard: int, num_shards: int) -> int:
        even = self.num_values * shard // num_shards
        if not self.update_rule.needs_whole_row:
            return even
        return next((segment.offset for segment in self.segments if segment.offset >= even), self.num_values)

    @property
    def table_id(self) -> int:
        """The 32 bits that stand for it on the wire."""
        return table_id(self.name)

    @property
    def salt(self) -> int:
        """As a table's."""
        return table_salt(self.name)

    @property
    def update_rule(self) -> UpdateRule:
        """The rule that `rule` names."""
        return RULES[self.rule]

    @property
    def schema_hash(self) -> int:
        """64 bits of everything: equal on two sides only if they mean the same parameters."""
        return _hash_of(self._fields())

    def to_json(self) -> str:
        """The spec as canonical JSON; `parse_spec` reads it."""
        return _canonical(self._fields())

    def differences(self, other: TableSpec | DenseSpec) -> list[str]:
        """What the two disagree about, this one's value first; empty if they may meet. As a table's."""
        if not isinstance(other, DenseSpec):
            return ["kind dense and table"]
        pairs = [("name", self.name, other.name), *_rule_pairs(self, other)]
        pairs += [("number of segments", len(self.segments), len(other.segments))]
        for mine, its in zip(self.segments, other.segments, strict=False):
            fields = zip(Segment._fields, mine, its, strict=True)
            pairs += [(f"segment {mine.name!r} {field.replace('_', ' ')}", a, b) for field, a, b in fields]
        return [f"{name} {mine} and {its}" for name, mine, its in pairs if mine != its]

    def _fields(self) -> dict[str, Any]:
        return {
            "kind": "dense",
            "name": self.name,
            "rule": self.rule,
            "hyperparameters": dict(self.hyperparameters),
            "segments": [_shortest(segment) for segment in self.segments],
        }


def parse_spec(text: str) -> TableSpec | DenseSpec:
    """The spec that `to_json` wrote.

    Raises:
        ValueError: The text is no JSON, has a field too many or too few, or a value that the spec refuses.
    """
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"table spec: is no JSON ({error})") from None
    if not isinstance(fields, dict) or fields.get("kind") not in ("table", "dense"):
        raise ValueError("table spec: should be a JSON object of kind 'table' or 'dense'")
    try:
        fields["hyperparameters"] = tuple(fields["hyperparameters"].items())
        if fields.pop("kind") == "table":
            return TableSpec(**{**fields, "initializer": Initializer(*fields["initializer"])})
        return DenseSpec(**{**fields, "segments": tuple(Segment(*segment) for segment in fields["segments"])})
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"table spec: has a field too many, too few or of another type ({error})") from None


def _named(kind: str, name: object) -> str:
    if not isinstance(name, str) or not re.fullmatch(NAME_PATTERN, name):
        raise ValueError(f"{kind} {name!r}: a name should be 1 to 128 of A-Z a-z 0-9 _ . @ / -")
    return f"{kind} {name!r}"


def _complete(
    where: str, rule: str, hyperparameters: tuple[tuple[str, float], ...], extra: Mapping[str, float]
) -> tuple[tuple[str, float], ...]:
    if not isinstance(rule, str) or rule not in RULES:
        raise ValueError(f"{where}: rule is {rule!r}, should be one of {', '.join(sorted(RULES))}")
    given = dict(hyperparameters)
    complete = dict(RULES[rule].defaults)
    if unknown := [name for name in given if name not in complete and name not in extra]:
        has = f"has {', '.join(complete)}" if complete else "has none"
        raise ValueError(f"{where}: hyperparameter {unknown[0]!r} is unknown; rule {rule!r} {has}")
    for name, value in given.items():
        if not _is_number(value):
            raise ValueError(f"{where}: hyperparameter {name!r} is {value!r}, should be a finite number")
        complete[name] = float(value)
    return tuple(sorted((name, value) for name, value in complete.items() if value != extra.get(name)))


def _check_bounds(where: str, bounds: Bounds) -> None:
    if bounds.low > bounds.high:
        raise ValueError(f"{where}: clip_min is {bounds.low}, should be at most clip_max, which is {bounds.high}")


def _shortest(segment: Segment) -> list[Any]:
    """The segment as JSON has it: without the last values while they are the ones that change nothing."""
    changing = 8 if segment.bounds != UNBOUNDED else 6 if any(segment.decay) else 4
    return list(segment[:changing])


def _rule_pairs(mine: TableSpec | DenseSpec, its: TableSpec | DenseSpec) -> list[tuple[str, Any, Any]]:
    if read_only.name in (mine.rule, its.rule):
        return []
    if mine.rule != its.rule:
        return [("rule", mine.rule, its.rule)]
    ours, other = (_OF_EVERY_RULE | dict(spec.hyperparameters) for spec in (mine, its))
    return [(name, ours[name], other[name]) for name in sorted(ours)]


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= FLOAT32_MAX


def _canonical(fields: dict[str, Any]) -> str:
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _hash_of(fields: dict[str, Any]) -> int:
    return xxhash.xxh3_64_intdigest(_canonical(fields).encode())


def _set(spec: TableSpec | DenseSpec, name: str, value: object) -> None:
    object.__setattr__(spec, name, value)
