"""The tree in the docstring of errors.py, and docs/errors.md, against the classes."""

from __future__ import annotations

import inspect
import re

import pytest

from fleet_sparse import errors
from fleet_sparse.errors import FleetSparseError
from support.sources import ROOT

_LINE = re.compile(r"^(?P<indent>(?:│  |   )*)(?:├─ |└─ )(?P<name>\w+) +(?P<text>.*)$")


class Entry:
    """One line of the drawing."""

    def __init__(self, name: str, parent: str, attributes: list[str]) -> None:
        self.name = name
        self.parent = parent
        self.attributes = attributes


def drawn() -> list[Entry]:
    assert errors.__doc__ is not None
    above = [FleetSparseError.__name__]
    entries = []
    for line in errors.__doc__.splitlines():
        found = _LINE.match(line)
        if found is None:
            continue
        depth = len(found["indent"]) // 3 + 1
        del above[depth:]
        entries.append(Entry(found["name"], above[-1], re.findall(r"\.(\w+)\b", found["text"])))
        above.append(found["name"])
    return entries


CLASSES = {
    name: kind
    for name, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, FleetSparseError) and kind is not FleetSparseError
}
ENTRIES = drawn()


def test_the_tree_draws_every_class_and_no_other() -> None:
    assert sorted(entry.name for entry in ENTRIES) == sorted(CLASSES)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_a_class_hangs_where_it_is_drawn(entry: Entry) -> None:
    assert CLASSES[entry.name].__bases__ == (getattr(errors, entry.parent),)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_a_class_carries_the_attributes_that_are_drawn(entry: Entry) -> None:
    own = "__init__" in vars(CLASSES[entry.name])
    parameters = inspect.signature(CLASSES[entry.name].__init__).parameters if own else ()
    wanted = [name for name in parameters if name not in {"self", "message"}]
    assert sorted(entry.attributes) == sorted(wanted)
    values = {name: object() for name in wanted}
    error = CLASSES[entry.name]("the message", **values)
    assert str(error) == "the message"
    assert {name: getattr(error, name) for name in wanted} == values


def test_the_page_has_the_classes_in_the_order_of_the_tree() -> None:
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\w+)$", page, re.M) == [entry.name for entry in ENTRIES]


def test_error_codes_are_distinct_and_never_zero() -> None:
    values = [code.value for code in errors.ErrorCode]
    assert len(set(values)) == len(errors.ErrorCode.__members__)
    assert 0 not in values
