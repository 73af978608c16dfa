"""Watermark: number of the newest applied push of a client."""

from __future__ import annotations

from typing import NamedTuple


class Watermark(NamedTuple):
    """All pushes of `client_id` up to number `watermark` are applied, and none after it. `epoch` is reserved."""

    client_id: bytes
    epoch: int
    watermark: int
