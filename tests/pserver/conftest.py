from __future__ import annotations

from pathlib import Path

import pytest

from support.controls import HeldControl


@pytest.fixture
def held(tmp_path: Path) -> HeldControl:
    """The control plane of one pserver, whose root is `tmp_path`."""
    return HeldControl(tmp_path)
