"""Losses on real pserver processes against plain Paddle, as the command shows them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fleet_sparse.plugin.parity import OPTIMIZERS
from support.jobs import environment


@pytest.mark.parametrize("num_servers", [1, 4])
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_losses_equal_plain_paddles(optimizer, num_servers):
    command = [sys.executable, "-m", "fleet_sparse.cli", "parity", "--optimizer", optimizer]
    ended = subprocess.run(
        [*command, "--servers", str(num_servers)],
        env=environment(COLUMNS="120"),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"50 steps, 1 worker, {num_servers} pserver" in ended.stdout
    assert "yes" in ended.stdout
