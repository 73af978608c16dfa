"""Ends a process, as its disk sees it, before, in or after one of its storage calls.

All files of logs and snapshots are written by functions of `os`, which are replaced here. After the crash no thread
changes a file any more.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

STORAGE_CALLS = (
    "pwritev",
    "pwrite",
    "write",
    "posix_fallocate",
    "ftruncate",
    "fdatasync",
    "fsync",
    "mkdir",
    "rename",
    "link",
    "unlink",
    "rmdir",
)
BEFORE, TORN, AFTER = "before", "torn", "after"
"""When a process crashes: before a call, in the middle of what `pwritev` writes, or after a call."""


class Crash(SystemExit):
    """The end of the process. No cleanup catches it."""


class Failpoint:
    """One storage call at which a process ends.

    Args:
        call: Name of the function of `os`; empty for a process that does not crash.
        number: The calls of it that come before.
        when: BEFORE, TORN or AFTER.

    Attributes:
        counts: Storage calls so far, by name.
        has_crashed: True from the crash on.
    """

    def __init__(self, call: str = "", number: int = 0, when: str = BEFORE) -> None:
        self.counts: Counter[str] = Counter()
        self.has_crashed = False
        self._call, self._number, self._when = call, number, when
        self._looks = False
        self._lock = threading.Lock()

    def run(self, life: Callable[[], object], look: Callable[[], object] = lambda: None) -> None:
        """Runs a process up to its crash or its end.

        Args:
            life: What it does, in this thread. What it holds afterwards is to be freed by hand.
            look: Called afterwards, while other threads of the process change no file.
        """
        with mock.patch.multiple(os, **{name: self._guarded(name, getattr(os, name)) for name in STORAGE_CALLS}):
            try:
                life()
            except Crash:
                assert self.has_crashed
            self._looks = True
            look()

    def _guarded(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            is_main = threading.current_thread() is threading.main_thread()
            if self._looks if is_main else threading.current_thread().name != "fleet_sparse log":
                return real(*arguments, **options)
            with self._lock:
                if self.has_crashed:
                    raise Crash
                is_here = (name, self.counts[name]) == (self._call, self._number)
                self.counts[name] += 1
                if is_here:
                    self.has_crashed = True
                    if self._when == AFTER:
                        real(*arguments, **options)
                    elif self._when == TORN:
                        file, parts, offset = arguments
                        content = b"".join(parts)
                        real(file, [content[: len(content) // 2]], offset)
                    raise Crash
                return real(*arguments, **options)

        return call
