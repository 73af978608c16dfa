"""Layers of click models on pservers, with several workers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from support.jobs import numbers, output_of, outputs_of

SCRIPTS = Path(__file__).parent / "scripts"
PADDLE_2 = Path(__file__).parents[2] / ".venv-paddle-2.6" / "bin" / "python"
"""Made by the benchmarks (docs/development.md)."""


def test_sums_of_2_workers_on_2_pservers_are_exact(tmp_path: Path) -> None:
    for output in outputs_of("ctr_layers.py", tmp_path, num_workers=2, num_servers=2):
        assert numbers("counts", output) == [0.0], output
        assert max(numbers("sums", output)) < 1e-4, output


@pytest.mark.slow
@pytest.mark.skipif(not PADDLE_2.exists(), reason="there is no venv with Paddle 2.6")
def test_50_steps_are_those_of_paddle_2_6(tmp_path: Path) -> None:
    command = [str(PADDLE_2), str(SCRIPTS / "ctr_layers_peer.py")]
    expected = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True).stdout
    found = numbers("loss", output_of("ctr_layers_peer.py", tmp_path))
    assert len(found) == 50
    np.testing.assert_allclose(found, numbers("loss", expected), rtol=0, atol=1e-6)
