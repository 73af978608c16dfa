"""Custom update rules: the setting FLEET_SPARSE_RULES names the module that defines them."""

from __future__ import annotations

import importlib
from typing import Any

from fleet_sparse.core.rules import RULES, UpdateRule
from fleet_sparse.errors import SettingError

_SETTING = "FLEET_SPARSE_RULES"


def add_rules(module_name: str) -> None:
    """Adds the update rules of a module to `RULES`. Adding the same module again changes nothing.

    The name comes from the environment of this process: a process never imports what a peer or a file names.

    Args:
        module_name: Name of an importable module whose top-level `RULES` is a list of `UpdateRule`; empty for none.

    Raises:
        SettingError: The module cannot be imported, has no such list, or has a rule that is not valid. No rule was
            added.
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
            raise SettingError(f"{where}: rule {rule.name!r} exists already. Give it another name")
        _check(f"{where}: rule {rule.name!r}", rule)
        added[rule.name] = rule
    RULES.update(added)


def _check(where: str, rule: UpdateRule) -> None:
    names = [name for name, _ in rule.defaults]
    if names != sorted(set(names)):
        raise SettingError(f"{where}: defaults are {names}, should be distinct and sorted by name")
    if rule.kernel is None:
        raise SettingError(f"{where}: has no kernel, should have one")
    num_initial = len(rule.initial_state(dict(rule.defaults)))
    if num_initial != rule.num_states:
        raise SettingError(
            f"{where}: initial_state returns {num_initial} values, should return num_states, {rule.num_states}"
        )
