"""ReceivingBytes: a bound for the frames of all connections that have arrived in part."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

_Peer = TypeVar("_Peer")


class ReceivingBytes(Generic[_Peer]):
    """Decides which peers may receive a large frame now. Memory is allocated only for those frames.

    A single frame is always admitted, however large. Peers that wait are admitted in the order in which they asked.

    Args:
        max_bytes: Largest number of bytes of all frames that are being received.
        pause: Called with a peer that has to wait.
        resume: Called with a peer that waited and may receive its frame now.

    Attributes:
        now: Monotonic time in seconds, to be set from time to time.
        num_bytes: Bytes of the frames that are being received, as they will be when they are complete.
    """

    def __init__(self, max_bytes: int, pause: Callable[[_Peer], None], resume: Callable[[_Peer], None]) -> None:
        self._max_bytes = max_bytes
        self._pause = pause
        self._resume = resume
        self._frames: dict[_Peer, tuple[int, float]] = {}  # size, and time when it began; oldest first
        self._waiting: deque[tuple[_Peer, int]] = deque()
        self.now = 0.0
        self.num_bytes = 0

    @property
    def num_waiting(self) -> int:
        """Number of peers that wait."""
        return len(self._waiting)

    def take(self, peer: _Peer, num_bytes: int) -> bool:
        """Returns whether a peer may receive a frame of this size now; else it waits until it is resumed.

        Args:
            peer: Receives no other frame; it may ask again.
            num_bytes: Size of the frame.
        """
        frames = self._frames
        if peer in frames:  # it has waited
            return True
        if self._waiting or (frames and self.num_bytes + num_bytes > self._max_bytes):  # nobody overtakes
            self._waiting.append((peer, num_bytes))
            self._pause(peer)
            return False
        frames[peer] = num_bytes, self.now
        self.num_bytes += num_bytes
        return True

    def release(self, peer: _Peer) -> None:
        """Forgets the frame of a peer, which is complete; does nothing without one."""
        frame = self._frames.pop(peer, None)
        if frame is None:
            return
        self.num_bytes -= frame[0]
        while self._waiting and (not self._frames or self.num_bytes + self._waiting[0][1] <= self._max_bytes):
            waiting, num_bytes = self._waiting.popleft()
            self._frames[waiting] = num_bytes, self.now
            self.num_bytes += num_bytes
            self._resume(waiting)

    def withdraw(self, peer: _Peer) -> None:
        """Forgets a peer whose connection ended."""
        if self._waiting:
            self._waiting = deque(each for each in self._waiting if each[0] is not peer)
        self.release(peer)

    def slowest(self, since: float) -> _Peer | None:
        """Returns the peer whose frame began first if that was before `since` and others wait; else None."""
        if not self._waiting:
            return None
        peer, (_, begun_at) = next(iter(self._frames.items()))
        return peer if begun_at < since else None
