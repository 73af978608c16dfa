from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import snapshot

EACH_WAITS_FOR_THE_OTHER = """
import pathlib, sys, time
mine, other = map(pathlib.Path, sys.argv[1:])
print("ready", flush=True)
sys.stdin.readline()
mine.touch()
until = time.monotonic() + 30
while not other.exists():
    if time.monotonic() > until:
        sys.exit(1)
    time.sleep(0.01)
"""


def test_processes_that_read_or_write_do_so_at_the_same_time(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    assert snapshot.raw(EACH_WAITS_FOR_THE_OTHER, [(one, other), (other, one)]) > 0


def test_a_process_that_failed_to_read_or_write_ends_the_benchmark() -> None:
    with pytest.raises(SystemExit, match="only reads or writes failed"):
        snapshot.raw("print(flush=True); input(); raise SystemExit(1)", [()])
