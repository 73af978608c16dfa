"""Refusal: the error of a request that a shard does not carry out."""

from __future__ import annotations

from fleet_sparse.errors import ErrorCode
from fleet_sparse.wire.frame_format import FrameError


class Refusal(Exception):
    """A request is refused and changed nothing; its client gets an ERROR frame.

    Attributes:
        error: Contents of the frame.
    """

    def __init__(self, code: ErrorCode, message: str, number: int = 0) -> None:
        super().__init__(message)
        self.error = FrameError(code, number, message)

    @classmethod
    def because(cls, error: FrameError) -> Refusal:
        """Returns a refusal for a reason that is already known."""
        return cls(error.code, error.message, error.number)
