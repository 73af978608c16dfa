"""Custom update rules and entry policies: the setting FLEET_SPARSE_RULES names the module that defines them."""

from __future__ import annotations

import importlib
from typing import Any

from fleet_sparse.core.entries import ENTRIES, SETS_OF_STATISTICS, EntryPolicy
from fleet_sparse.core.rules import RULES, UpdateRule
from fleet_sparse.errors import SettingError

_SETTING = "FLEET_SPARSE_RULES"


def add_rules(module_name: str) -> None:
    """Adds the rules of a module to `RULES`, and its entry policies to `ENTRIES`. A second time changes nothing.

    The name comes from the environment of this process: a process never imports what a peer or a file names.

    Args:
        module_name: Name of an importable module; empty for none. Its top-level `RULES` is a list of `UpdateRule`, its
            `ENTRIES` a list of `EntryPolicy`; it has at least one of both.

    Raises:
        SettingError: The module cannot be imported, has no such list, or has a rule or policy that is not valid.
            Nothing was added.
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
    policies: Any = getattr(module, "ENTRIES", [])
    rules: Any = getattr(module, "RULES", [] if policies else None)
    if not isinstance(rules, (list, tuple)) or not all(isinstance(rule, UpdateRule) for rule in rules):
        raise SettingError(f"{where}: its RULES should be a list of UpdateRule")
    if not isinstance(policies, (list, tuple)) or not all(isinstance(policy, EntryPolicy) for policy in policies):
        raise SettingError(f"{where}: its ENTRIES should be a list of EntryPolicy")
    added: dict[str, UpdateRule] = {}
    given: list[UpdateRule] = list(rules)
    for rule in given:
        if rule.name in added or (rule.name in RULES and RULES[rule.name] is not rule):
            raise SettingError(f"{where}: rule {rule.name!r} exists already. Give it another name")
        _check(f"{where}: rule {rule.name!r}", rule)
        added[rule.name] = rule
    added_policies = _checked_policies(where, list(policies))
    RULES.update(added)
    ENTRIES.update(added_policies)


def _checked_policies(where: str, policies: list[EntryPolicy]) -> dict[str, EntryPolicy]:
    """Returns the entry policies of a module by name."""
    added: dict[str, EntryPolicy] = {}
    for policy in policies:
        what = f"{where}: entry policy {policy.name!r}"
        if policy.name in added or (policy.name in ENTRIES and ENTRIES[policy.name] is not policy):
            raise SettingError(f"{what} exists already. Give it another name")
        names = [name for name, _ in policy.defaults]
        if names != sorted(set(names)):
            raise SettingError(f"{what}: defaults are {names}, should be distinct and sorted by name")
        if policy.statistics not in SETS_OF_STATISTICS:
            sets = ", ".join(str(each) for each in SETS_OF_STATISTICS)
            raise SettingError(f"{what}: statistics are {policy.statistics}, should be one of {sets}")
        added[policy.name] = policy
    return added


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
