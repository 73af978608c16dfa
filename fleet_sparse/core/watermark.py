"""Watermark: the newest applied push of one client."""

from __future__ import annotations

from typing import NamedTuple


class Watermark(NamedTuple):
    """All pushes of `client_id` in `epoch` up to number `watermark` are applied, and none after it."""

    client_id: bytes
    epoch: int
    watermark: int
