"""Entry policies in jobs of real processes: two pservers, two workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.jobs import numbers, outputs_of

SCRIPT = "entries.py"


def trained(directory: Path, **variables: str) -> list[float]:
    """The values of ids 1 to 4, which all workers see alike, and the number of rows of all pservers."""
    found = [
        [*numbers(r"row \d", output), *numbers("rows", output)] for output in outputs_of(SCRIPT, directory, **variables)
    ]
    assert found[0] == found[1], found
    return found[0]


@pytest.mark.parametrize("kind", ["exact", pytest.param("sketch", marks=pytest.mark.slow)])
def test_ids_are_trained_once_all_workers_named_them_enough(tmp_path: Path, kind: str) -> None:
    assert trained(tmp_path, ENTRY=kind, STEPS="2") == [0, 0.75, 0, 0, 0]
    assert trained(tmp_path, ENTRY=kind, STEPS="5") == [0.25, -0.75, 0.25, 0, 3]


@pytest.mark.slow
def test_counting_continues_after_a_load(tmp_path: Path) -> None:
    assert trained(tmp_path, ENTRY="exact", STEPS="2", SAVE="1") == [0, 0.75, 0, 0, 0]
    assert trained(tmp_path, ENTRY="exact", STEPS="3", LOAD="1") == [0.25, -0.75, 0.25, 0, 3]
