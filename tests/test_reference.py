from __future__ import annotations

import sys

import pytest

import fleet_sparse
from fleet_sparse import nn
from support.sources import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import reference


@pytest.fixture(scope="module")
def page() -> str:
    return reference.reference()


def test_the_page_is_what_the_docstrings_say(page: str) -> None:
    assert reference.PAGE.read_text(encoding="utf-8") == page, "run scripts/docs"


@pytest.mark.parametrize(
    ("level", "name"), [*(("##", name) for name in fleet_sparse.__all__), *(("###", name) for name in nn.__all__)]
)
def test_a_public_name_has_a_signature_and_a_sentence(page: str, level: str, name: str) -> None:
    entry = page.split(f"\n{level} {name}\n")[1].split(f"\n{level} ", maxsplit=1)[0]
    signature, _, text = entry.removeprefix("\n```python\n").partition("\n```\n")
    assert name in signature
    assert len(text.strip()) > 20
