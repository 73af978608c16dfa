"""The extra `onnx`, which every Python has for which paddle2onnx has wheels: its tests are not skipped there."""

from __future__ import annotations

import sys

import pytest

HAS_ONNX = sys.version_info < (3, 13)
needs_onnx = pytest.mark.skipif(not HAS_ONNX, reason="paddle2onnx has no wheels for this Python")
