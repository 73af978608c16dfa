"""Workers that cache rows: real pservers, real Paddle."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.jobs import outputs_of


@pytest.mark.parametrize(
    ("mode", "look_ahead"),
    [
        ("sync", ""),
        ("async", "1"),
        *(pytest.param(*values, marks=pytest.mark.slow) for values in [("sync", "1"), ("async", ""), ("lag", "1")]),
    ],
)
@pytest.mark.guarantee("H7")
def test_cached_rows_have_own_updates_and_at_a_barrier_all(tmp_path: Path, mode: str, look_ahead: str) -> None:
    outputs = outputs_of("cached.py", tmp_path, MODE=mode, LOOK_AHEAD=look_ahead)
    assert all("ended well" in output for output in outputs)
