"""A user's own update rules: the setting FLEET_SPARSE_RULES names their module."""

from __future__ import annotations

import importlib
from typing import Any

from fleet_sparse.errors import SettingError

from . import RULES
from .rule import UpdateRule

_SETTING = "FLEET_SPARSE_RULES"


def add_rules(module_name: str) -> None:
    """Adds the update rules of a module to `RULES`; of an empty name none, a second time nothing.

    It comes from the environment of this process alone: no code ever comes from the wire.

    Args:
        module_name: Importable; its top-level `RULES` is a list of `UpdateRule`.

    Raises:
        SettingError: It cannot be imported, has no such list, or a rule of it does not fit. No rule was added.
    """
    if not module_name:
        return
    where = f"{_SETTING}: module {module_name!r}"
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise SettingError(
            f"{where} cannot be imported ({type(error).__name__}: {error}). Is it on PYTHONPATH?"
        ) from error
    rules: Any = getattr(module, "RULES", None)
    if not isinstance(rules, (list, tuple)) or not all(isinstance(rule, UpdateRule) for rule in rules):
        raise SettingError(f"{where}: its RULES should be a list of UpdateRule")
    added: dict[str, UpdateRule] = {}
    given: list[UpdateRule] = list(rules)
    for rule in given:
        if rule.name in added or (rule.name in RULES and RULES[rule.name] is not rule):
            raise SettingError(f"{where}: there is a rule {rule.name!r} already; give it another name")
        _check(f"{where}: rule {rule.name!r}", rule)
        added[rule.name] = rule
    RULES.update(added)


def _check(where: str, rule: UpdateRule) -> None:
    names = [name for name, _ in rule.defaults]
    if names != sorted(set(names)):
        raise SettingError(f"{where}: defaults are {names}, should be distinct and sorted")
    if rule.kernel is None:
        raise SettingError(f"{where}: it has no kernel")
    num_initial = len(rule.initial_state(dict(rule.defaults)))
    if num_initial != rule.num_states:
        raise SettingError(
            f"{where}: initial_state gives {num_initial} values, should be num_states, {rule.num_states}"
        )
