"""README and docs against the tree, and the README's program against a fresh interpreter."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.jobs import environment
from support.sources import ROOT

PAGES = [ROOT / "README.md", ROOT / "README.zh.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
IN_CHINESE = [page for page in PAGES if page.name.endswith(".zh.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_link_leads_to_a_file(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", text)
    assert not [link for link in links if not (page.parent / link).is_file()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_path_that_is_named_exists(page: Path) -> None:
    named = re.findall(
        r"`((?:fleet_sparse|transpiler|pserver|models|tests|docs|scripts)/[\w./]*\w)`", page.read_text("utf-8")
    )
    assert not [path for path in named if not (ROOT / path).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_variable_that_is_named_exists(page: Path) -> None:
    running = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
    known = set(re.findall(r"^\| `(FLEET_SPARSE_\w+)`", running, re.M))
    assert set(re.findall(r"FLEET_SPARSE_\w+[A-Z]", page.read_text(encoding="utf-8"))) <= known


def test_every_guarantee_is_held_by_a_test() -> None:
    page = (ROOT / "docs" / "consistency.md").read_text(encoding="utf-8")
    stated = re.findall(r"^- \*\*([A-Z]\d+)\.\*\*", page, re.M)
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    held = re.findall(r'"([A-Z]\d+)"', "".join(re.findall(r"pytest\.mark\.guarantee\(([^)]*)\)", tests)))
    assert len(stated) == len(set(stated)) > 40
    assert set(stated) == set(held)


def test_every_page_is_found_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert not [page.name for page in PAGES[1:] if f"{page.relative_to(ROOT)})" not in readme]


@pytest.mark.parametrize("page", IN_CHINESE, ids=lambda page: page.name)
def test_a_page_in_chinese_has_the_code_of_the_english_one(page: Path) -> None:
    english = page.with_name(page.name.replace(".zh.md", ".md"))
    code, code_in_english = (
        re.findall(r"```.*?```", each.read_text(encoding="utf-8"), re.S) for each in (page, english)
    )
    assert code == code_in_english
    for each, other in ((page, english), (english, page)):
        assert f"]({other.name})" in each.read_text(encoding="utf-8")


def tables_of(page: Path) -> list[int]:
    """The number of lines of each table of a page, in order."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    return [table.count("\n") for table in re.findall(r"(?:^\|.*\n)+", text, re.M)]


@pytest.mark.parametrize("page", IN_CHINESE, ids=lambda page: page.name)
def test_a_table_in_chinese_has_the_rows_of_the_english_one(page: Path) -> None:
    assert tables_of(page) == tables_of(page.with_name(page.name.replace(".zh.md", ".md"))) != []


def links_of(page: Path) -> set[str]:
    """The pages that a page links to, each by its English name."""
    found = re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text(encoding="utf-8"))
    return {link.replace(".zh.md", ".md") for link in found}


@pytest.mark.parametrize("page", IN_CHINESE, ids=lambda page: page.name)
def test_a_page_in_chinese_leads_to_the_pages_of_the_english_one(page: Path) -> None:
    assert links_of(page) == links_of(page.with_name(page.name.replace(".zh.md", ".md")))


def test_the_readmes_program_learns_and_saves(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    program = re.search(r"```python\n(.*?)```", readme, re.S)
    assert program is not None
    (tmp_path / "train.py").write_text(program[1])
    command = [sys.executable, "train.py"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    losses = [float(text) for text in re.findall(r"loss ([\d.]+)", ended.stdout)]
    assert losses[-1] < 0.1, "a coin has 0.69"
    assert (tmp_path / "model" / "000001-full" / "MANIFEST.json").is_file()
