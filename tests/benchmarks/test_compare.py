"""The benchmark that compares two commits: what each side is told."""

from __future__ import annotations

from pathlib import Path

from benchmarks.compare import known_settings
from benchmarks.processes import NO_STANDBY
from benchmarks.record import ROOT


def test_an_older_checkout_gets_no_setting_that_it_refuses(tmp_path: Path) -> None:
    (tmp_path / "fleet_sparse").mkdir()
    (tmp_path / "fleet_sparse" / "settings.py").write_text("class Settings:\n    connect_s: float = 60.0\n")
    settings = {"FLEET_SPARSE_CONNECT_S": "1", **NO_STANDBY}
    assert known_settings(tmp_path, settings) == {"FLEET_SPARSE_CONNECT_S": "1"}
    assert known_settings(ROOT, settings) == settings
