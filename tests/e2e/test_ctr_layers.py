"""Layers of click models on pservers, with several workers."""

from __future__ import annotations

from pathlib import Path

from support.jobs import numbers, outputs_of


def test_sums_of_2_workers_on_2_pservers_are_exact(tmp_path: Path) -> None:
    for output in outputs_of("ctr_layers.py", tmp_path, num_workers=2, num_servers=2):
        assert numbers("counts", output) == [0.0], output
        assert max(numbers("sums", output)) < 1e-4, output
