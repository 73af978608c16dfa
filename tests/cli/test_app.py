"""Behaviour that all commands of `fleet-sparse` share."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

import fleet_sparse
from fleet_sparse import cli
from support.jobs import environment


def run(*arguments, code=None, columns=1000):
    command = [sys.executable, *(["-c", code] if code else ["-m", "fleet_sparse.cli"]), *arguments]
    return subprocess.run(
        command, env=environment(COLUMNS=str(columns)), capture_output=True, text=True, timeout=100, check=False
    )


def test_version_is_the_packages() -> None:
    result = CliRunner().invoke(cli.app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"fleet-sparse {fleet_sparse.__version__}\n")


@pytest.mark.parametrize(
    "arguments", [["--help"], ["plan", "--help"], ["snapshot", "--help"], ["snapshot", "inspect", "--help"]]
)
def test_help_waits_for_nothing_heavy(arguments) -> None:
    code = f"""
import sys
from fleet_sparse.cli import app
app({arguments}, standalone_mode=False)
print(sorted({{"numba", "numpy", "paddle", "grpc", "zmq"}} & set(sys.modules)))
"""
    ended = run(code=code)
    assert "Usage" in ended.stdout
    assert ended.stdout.splitlines()[-1] == "[]", ended.stderr


def test_an_error_is_one_line_on_stderr_and_exit_code_2(tmp_path) -> None:
    ended = run("snapshot", "verify", str(tmp_path), "--json", columns=40)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"fleet-sparse: {tmp_path}: it has no snapshot")
    assert len(ended.stderr.splitlines()) == 1
    assert "Traceback" not in ended.stderr
