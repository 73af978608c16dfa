"""Files at all commits of this checkout's history."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


def versions(root: Path, path: str) -> list[str]:
    """Returns the contents of a file at each ancestor that changed it, the newest first; skips the test without Git."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout

    try:
        commits = git("log", "--format=%H", "--diff-filter=AM", "--", path).split()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no Git history here")
    return [git("show", f"{commit}:./{path}") for commit in commits]
