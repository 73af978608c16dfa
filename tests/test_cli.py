from __future__ import annotations

from typer.testing import CliRunner

import fleet_sparse
from fleet_sparse.cli import app


def test_version_is_the_packages() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"fleet-sparse {fleet_sparse.__version__}\n")


def test_wrong_argument_is_told_without_a_trace() -> None:
    result = CliRunner().invoke(app, ["parity", "--servers", "many"])
    assert result.exit_code == 2
    assert "Invalid value for '--servers'" in result.output
    assert "Traceback" not in result.output
