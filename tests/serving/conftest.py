from __future__ import annotations

import pytest

from support.paddle_plugin import plugin

__all__ = ["plugin", "unchecked"]


@pytest.fixture
def unchecked(monkeypatch):
    """Leaves out the process that checks a saved model, which takes a second; other tests have it for each program."""
    from fleet_sparse.plugin import inference_model
    from fleet_sparse.serving.model import FORWARD, Finding

    monkeypatch.setattr(inference_model, "check_networks", lambda *_: [Finding(FORWARD, "default", 0.0)])
