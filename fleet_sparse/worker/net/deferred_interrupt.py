"""Ctrl-C waits while links and sockets change, so that it finds them whole."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class DeferredInterrupt:
    """In its block a SIGINT of the main thread is noted; the handler that was there is called when the block ends.

    In other threads, and where SIGINT has no handler of Python's, it does nothing. Of two blocks, one in the other, the
    outer one gets the signal when the inner one ends.

    A process that is forked from inside of a block is in none: the handler that was there has its place again, and a
    signal that was noted stays the parent's.

    Args:
        wake: Is called by the signal, so that the block may end soon.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        self._noted: tuple[int, FrameType | None] | None = None

    @property
    def is_pending(self) -> bool:
        """Whether there was one."""
        return self._noted is not None

    def __enter__(self) -> DeferredInterrupt:
        if threading.get_ident() == threading.main_thread().ident:
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        handler = self._handler
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
            self._handler = None
            if self._noted is not None:
                handler(*self._noted)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = number, frame
        self._wake()


def _leave_in_child() -> None:
    """Ends all blocks. The thread that forked goes on in the child alone, and may be another one than theirs."""
    handler: Any = signal.getsignal(signal.SIGINT)
    blocks = []
    while isinstance(block := getattr(handler, "__self__", None), DeferredInterrupt):
        blocks.append(block)
        handler = block._handler
    if blocks:
        signal.signal(signal.SIGINT, handler)
    for block in blocks:
        block._handler = block._noted = None


os.register_at_fork(after_in_child=_leave_in_child)
