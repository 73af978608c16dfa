from __future__ import annotations

import os
import shutil

import pytest

from benchmarks.system_calls import read_summary, system_calls


def test_a_summary_has_a_count_for_each_name() -> None:
    text = "    calls syscall\n--------- -----\n       80 wait4\n     1374 openat\n--------- -----\n     1454 total\n"
    assert read_summary(text) == {"wait4": 80, "openat": 1374}


@pytest.mark.skipif(not shutil.which("strace"), reason="strace is missing")
def test_calls_of_the_block_are_counted() -> None:
    with system_calls([os.getpid()]) as counts:
        for _ in range(100):
            os.getppid()
    assert not counts or counts["getppid"] == 100


def test_nothing_is_counted_without_strace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with system_calls([os.getpid()]) as counts:
        os.getppid()
    assert counts == {}
