"""DeferredInterrupt: Ctrl-C waits while links and sockets change, so that it finds them in a consistent state."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # 0.8 us a block; `signal` takes 14 us, for enums
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, ClassVar

_SIGINT = int(signal.SIGINT)


class DeferredInterrupt:
    """Defers a SIGINT of the main thread to the end of its block, where the previous handler is called.

    In other threads, and if SIGINT has no Python handler, it does nothing. Blocks may be nested: the outer one gets the
    signal when the inner one ends.

    A child process that is forked inside a block is in no block: the previous handler is restored there, and a signal
    that was deferred stays the parent's.

    Args:
        wake: Called by the signal, so that a block that waits may end soon; None if it does not wait.

    Attributes:
        is_pending: True if a signal was deferred.
    """

    _main_thread_id: ClassVar[int | None] = threading.main_thread().ident
    _innermost: ClassVar[DeferredInterrupt | None] = None

    def __init__(self, wake: Callable[[], None] | None = None) -> None:
        self._wake = wake
        self._handler: Callable[[int, FrameType | None], Any] | None = None  # of the outermost block
        self._outer: DeferredInterrupt | None = None
        self._noted: tuple[int, FrameType | None] | None = None
        self.is_pending = False

    def __enter__(self) -> DeferredInterrupt:
        if threading.get_ident() != DeferredInterrupt._main_thread_id:
            return self
        if DeferredInterrupt._innermost is not None:
            self._outer, DeferredInterrupt._innermost = DeferredInterrupt._innermost, self
            return self
        handler = _signal.getsignal(_SIGINT)
        if callable(handler):
            self._handler = handler
            _signal.signal(_SIGINT, self._on_signal)
            DeferredInterrupt._innermost = self  # last: until here the previous handler may have raised
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._outer is not None:
            outer, self._outer = self._outer, None
            DeferredInterrupt._innermost = outer
            if self._noted is not None:
                outer._note(*self._noted)
        elif self._handler is not None:
            handler, self._handler = self._handler, None
            DeferredInterrupt._innermost = None  # first: from here on the previous handler may raise
            _signal.signal(_SIGINT, handler)
            if self._noted is not None:
                handler(*self._noted)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        (DeferredInterrupt._innermost or self)._note(number, frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = number, frame
        self.is_pending = True
        if self._wake is not None:
            self._wake()


def _leave_in_child() -> None:
    """Ends all blocks. The thread that forked is alone in the child, and may not be the one that is in the blocks."""
    DeferredInterrupt._main_thread_id = threading.get_ident()
    block, DeferredInterrupt._innermost = DeferredInterrupt._innermost, None
    while block is not None:
        if block._handler is not None:
            signal.signal(signal.SIGINT, block._handler)
        outer, block._outer = block._outer, None
        block._handler = block._noted = None
        block.is_pending = False
        block = outer


os.register_at_fork(after_in_child=_leave_in_child)
