"""Spec: name, update rule and identity, which a table and dense parameters have in common."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import xxhash

from .bounds import UNBOUNDED, Bounds
from .ids import table_id, table_salt
from .initializer import FLOAT32_MAX
from .rules import RULES, UpdateRule, read_only

NAME_PATTERN = r"[A-Za-z0-9_.@/-]{1,128}"

DECAY_DEFAULTS = {"l1_decay": 0.0, "l2_decay": 0.0}
BOUNDS_DEFAULTS = {"clip_min": UNBOUNDED.low, "clip_max": UNBOUNDED.high}
GRADIENT_DEFAULTS = DECAY_DEFAULTS | BOUNDS_DEFAULTS
"""Hyperparameters that change the gradient before the rule sees it, with the values at which they change nothing.

Every rule of a table accepts them. A spec leaves out those that have these values.
"""


@dataclass(frozen=True)
class Spec:
    """The fields that `TableSpec` and `DenseSpec` share. Only those two are constructed.

    Attributes:
        name: 1 to 128 of `A-Z a-z 0-9 _ . @ / -`.
        rule: A key of `RULES`.
        hyperparameters: (name, value) of every hyperparameter of the rule, sorted by name. Those that the caller leaves
            out get the rule's defaults.
    """

    kind: ClassVar[str]
    """"table" or "dense", as messages and JSON say it."""
    accepted: ClassVar[Mapping[str, float]] = {}
    """Hyperparameters beyond those of the rule, with the values at which the spec leaves them out."""

    name: str
    rule: str
    hyperparameters: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(NAME_PATTERN, self.name):
            raise ValueError(f"{self.where}: a name should be 1 to 128 of A-Z a-z 0-9 _ . @ / -")
        if not isinstance(self.rule, str) or self.rule not in RULES:
            raise ValueError(f"{self.where}: rule is {self.rule!r}, should be one of {', '.join(sorted(RULES))}")
        self._set("hyperparameters", self._complete())

    @property
    def where(self) -> str:
        """The spec as messages name it: its kind and its name."""
        return f"{self.kind} {self.name!r}"

    @property
    def update_rule(self) -> UpdateRule:
        """The rule that `rule` names."""
        return RULES[self.rule]

    @cached_property
    def table_id(self) -> int:
        """The 32 bits that name the table or dense parameters in a frame."""
        return table_id(self.name)

    @cached_property
    def salt(self) -> int:
        """The 64 bits that ids of the table are combined with before they are hashed."""
        return table_salt(self.name)

    @cached_property
    def schema_hash(self) -> int:
        """64 bits over every field but `max_ids`; two sides whose hashes are equal mean the same table."""
        fields = {name: value for name, value in self._fields().items() if name != "max_ids"}
        return xxhash.xxh3_64_intdigest(_canonical_json(fields).encode())

    def to_json(self) -> str:
        """The spec as canonical JSON; `parse_spec` reads it. Files and messages hold these bytes."""
        return self._json

    @cached_property
    def _json(self) -> str:
        return _canonical_json(self._fields())

    def _fields(self) -> dict[str, Any]:
        raise NotImplementedError

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _complete(self) -> tuple[tuple[str, float], ...]:
        complete = dict(self.update_rule.defaults)
        for name, value in dict(self.hyperparameters).items():
            if name not in complete and name not in self.accepted:
                has = f"has {', '.join(name for name, _ in self.update_rule.defaults) or 'none'}"
                raise ValueError(f"{self.where}: hyperparameter {name!r} is unknown; rule {self.rule!r} {has}")
            if not is_number(value):
                raise ValueError(f"{self.where}: hyperparameter {name!r} is {value!r}, should be a finite number")
            complete[name] = float(value)
        return tuple(sorted((name, value) for name, value in complete.items() if value != self.accepted.get(name)))

    def _rule_pairs(self, other: Spec) -> list[tuple[str, object, object]]:
        """Rule and hyperparameters of both sides. Empty if one side only reads: it need not know the rule."""
        if read_only.name in (self.rule, other.rule):
            return []
        if self.rule != other.rule:
            return [("rule", self.rule, other.rule)]
        mine, its = (GRADIENT_DEFAULTS | dict(spec.hyperparameters) for spec in (self, other))
        return [(name, mine[name], its[name]) for name in sorted(mine)]


def unequal(pairs: list[tuple[str, object, object]]) -> list[str]:
    """Returns those (name, mine, its) whose values differ, as `dim 8 and 16`."""
    return [f"{name} {mine} and {its}" for name, mine, its in pairs if mine != its]


def check_bounds(where: str, bounds: Bounds) -> None:
    """Raises `ValueError` if the lower bound is above the upper one."""
    if bounds.low > bounds.high:
        raise ValueError(f"{where}: clip_min is {bounds.low}, should be at most clip_max, which is {bounds.high}")


def is_int(value: object) -> bool:
    """Returns whether the value is an int and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Returns whether the value is a number that is finite in float32, and no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= FLOAT32_MAX


def _canonical_json(fields: dict[str, Any]) -> str:
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
