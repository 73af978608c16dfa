from __future__ import annotations

import itertools
import sys

import pytest

from fleet_sparse import custom_rules
from fleet_sparse.core.entries import ENTRIES
from fleet_sparse.core.rules import RULES
from fleet_sparse.custom_rules import add_rules
from fleet_sparse.errors import SettingError

_numbers = itertools.count()

HEAD = "from fleet_sparse.core.rules import RULES as OURS, UpdateRule\nsgd = OURS['sgd']\n"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes importable modules and returns their names; afterwards modules and rules are removed again."""
    monkeypatch.syspath_prepend(tmp_path)
    before, names = dict(RULES), []

    def write(text):
        names.append(f"some_rules_{next(_numbers)}")
        (tmp_path / f"{names[-1]}.py").write_text(HEAD + text)
        return names[-1]

    yield write
    RULES.clear()
    RULES.update(before)
    for name in names:
        sys.modules.pop(name, None)


def test_rules_of_a_module_are_added(module):
    before = dict(RULES)
    name = module("RULES = [sgd._replace(name='a'), sgd._replace(name='b')]")
    add_rules(name)
    expected = before | {rule.name: rule for rule in sys.modules[name].RULES}
    assert expected == RULES
    assert RULES["a"].kernel is RULES["sgd"].kernel


def test_module_may_be_named_again(module):
    name = module("RULES = [sgd._replace(name='a')]")
    add_rules(name)
    add_rules(name)
    assert "a" in RULES


def test_no_module_adds_no_rule():
    before = dict(RULES)
    add_rules("")
    assert before == RULES


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise KeyError('x')", "KeyError"),
        ("", "RULES.*UpdateRule"),
        ("RULES = [sgd, 'adam']", "RULES.*UpdateRule"),
        ("RULES = [sgd._replace(num_states=0, scalars=None)]", "rule 'sgd' exists"),
        ("RULES = [sgd._replace(name='a')] * 2", "rule 'a' exists"),
        ("RULES = [OURS['read_only']._replace(name='a')]", "rule 'a': has no kernel"),
        ("RULES = [sgd._replace(name='a', num_states=1)]", "rule 'a': .*num_states, 1"),
        ("RULES = [sgd._replace(name='a', defaults=(('y', 1.0), ('x', 1.0)))]", "rule 'a': defaults"),
    ],
)
def test_invalid_module_is_refused_and_adds_nothing(module, text, message):
    before, name = dict(RULES), module(text)
    with pytest.raises(SettingError, match=rf"FLEET_SPARSE_RULES: module '{name}'.*{message}"):
        add_rules(name)
    assert before == RULES


def test_missing_module_is_refused():
    with pytest.raises(SettingError, match="FLEET_SPARSE_RULES: module 'no_such_rules'"):
        add_rules("no_such_rules")


POLICIES = "from fleet_sparse.core.entries import ENTRIES as THEIRS\ncount = THEIRS['count_filter']\n"


def test_entry_policies_of_a_module_are_added(module, monkeypatch):
    monkeypatch.setattr(custom_rules, "ENTRIES", dict(ENTRIES))
    name = module(POLICIES + "ENTRIES = [count._replace(name='mine')]")
    add_rules(name)
    add_rules(name)
    assert custom_rules.ENTRIES["mine"].kernel is ENTRIES["count_filter"].kernel


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ENTRIES = [3]", "EntryPolicy"),
        ("ENTRIES = [count._replace(statistics=())]", "'count_filter'"),
        ("ENTRIES = [count._replace(name='a', statistics=('show',))]", "'a'.*show"),
        ("ENTRIES = [count._replace(name='a', defaults=(('b', 1.0), ('a', 1.0)))]", "'a'.*sorted"),
    ],
)
def test_wrong_entry_policies_are_refused(module, text, message):
    before = dict(ENTRIES)
    with pytest.raises(SettingError, match=message):
        add_rules(module(POLICIES + text))
    assert before == ENTRIES
