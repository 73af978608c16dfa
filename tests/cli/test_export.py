"""`fleet-sparse export`: arguments, output and exit codes; what it does is in tests/serving and tests/e2e."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from fleet_sparse import cli
from fleet_sparse.errors import SnapshotError


def run(*arguments):
    return CliRunner().invoke(cli.app, ["export", *map(str, arguments)])


@pytest.mark.parametrize(
    "arguments", [[], ["serve"], ["serve", "out", "--format", "pickle"], ["serve", "out", "--table", "emb"]]
)
def test_arguments_without_a_meaning_exit_with_2(arguments) -> None:
    assert run(*arguments).exit_code == 2


@pytest.mark.parametrize("to", ["paddle", "onnx", "dictionary"])
def test_a_directory_without_a_model_is_refused(tmp_path, to) -> None:
    result = run(tmp_path, tmp_path / "out", "--format", to)
    assert isinstance(result.exception, SnapshotError)
    assert "SERVING.json" in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_a_directory_without_a_dictionary_is_not_intact(tmp_path) -> None:
    result = run("--verify", tmp_path)
    assert isinstance(result.exception, SnapshotError)
    assert "DICTIONARY.json" in str(result.exception)
