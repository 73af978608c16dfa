from __future__ import annotations

from support.paddle_plugin import plugin

__all__ = ["plugin"]
