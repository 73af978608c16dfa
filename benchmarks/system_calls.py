"""System calls of processes, counted by `strace`."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

SystemCalls = dict[str, int]
"""Number of calls by name."""


@contextmanager
def system_calls(pids: Sequence[int]) -> Iterator[SystemCalls]:
    """Counts the system calls of all threads of processes while the block runs, which makes them slow.

    The dictionary is filled when the block ends. It stays empty where `strace` is missing or may not attach.
    """
    counts: SystemCalls = {}
    strace = shutil.which("strace")
    if not strace:
        yield counts
        return
    with tempfile.NamedTemporaryFile(encoding="utf-8", mode="r") as summary:
        attached = [word for pid in pids for word in ("-p", str(pid))]
        process = subprocess.Popen(
            [strace, "-f", "-c", "--summary-columns=calls,name", "-o", summary.name, *attached],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        for _ in pids:
            process.stderr.readline()  # "Process 7 attached ..."; empty if strace ended
        try:
            yield counts
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate()
            counts.update(read_summary(Path(summary.name).read_text()))


def read_summary(text: str) -> SystemCalls:
    """Returns the counts of a summary of `strace -c` with the columns calls and name."""
    counts = {}
    for line in text.splitlines():
        match line.split():
            case [calls, name] if calls.isdecimal() and name != "total":
                counts[name] = int(calls)
    return counts
