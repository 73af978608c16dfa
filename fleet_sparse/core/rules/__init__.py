"""Update rules: what a shard does with a gradient. A new rule is a module of this package and an entry of `RULES`."""

from __future__ import annotations

from .adagrad import adagrad
from .adam import adam
from .adamax import adamax
from .adamw import adamw
from .ctr_adagrad import ctr_adagrad
from .delta import delta
from .ftrl import ftrl
from .lamb import lamb
from .momentum import momentum
from .overwrite import overwrite
from .read_only import read_only
from .rmsprop import rmsprop
from .rule import KERNEL_TYPES, UpdateRule
from .sgd import sgd
from .summary import summary

RULES: dict[str, UpdateRule] = {
    rule.name: rule
    for rule in (
        *(sgd, adagrad, adam, momentum, rmsprop, adamw, adamax, ftrl, lamb, ctr_adagrad),
        *(overwrite, delta, summary, read_only),
    )
}

__all__ = ["KERNEL_TYPES", "RULES", "UpdateRule", "ctr_adagrad", "delta", "read_only", "summary"]
