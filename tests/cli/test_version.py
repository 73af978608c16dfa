"""`fleet-sparse version` and `predict`: arguments, output and exit codes; what they do is in tests/serving and e2e."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fleet_sparse import cli
from fleet_sparse.cli.terminal import console
from fleet_sparse.errors import FleetSparseError, SettingError, SnapshotCorrupt, SnapshotError
from support.snapshots import SGD, Model, TableModel, random_model, save


def run(*arguments: object) -> str:
    result = CliRunner().invoke(cli.app, [*map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def series(tmp_path: Path) -> Path:
    save(tmp_path, random_model(0, 40), 2)
    save(tmp_path, Model((TableModel(SGD, {}),)), kind="delta", removed={"sgd": [1, 2]})
    return tmp_path


def statuses(series: Path) -> list[list[str]]:
    listed = json.loads(run("version", "list", series, "--json"))["versions"]
    return [[name for name, holds in each.items() if name.startswith("is_") and holds] for each in listed]


def test_versions_are_listed_with_rows_bytes_and_status(series: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("version", "promote", series, 1)
    first, second = json.loads(run("version", "list", series, "--json"))["versions"]
    assert (first["number"], first["kind"], first["num_rows"], second["num_removed"]) == (1, "full", 80, 2)
    assert first["num_bytes"] == sum(path.stat().st_size for path in (series / "000001-full").glob("*.fss"))
    assert first["checksum"] == json.loads((series / "000001-full" / "MANIFEST.json").read_text())["checksum"]
    monkeypatch.setattr(console, "width", 200)
    shown = run("version", "list", series)
    for text in (
        "full",
        "delta",
        first["checksum"][:8],
        "2026-03-01 10:15",
        "0 -2",
        "served, pinned",
        "newest, rollback",
    ):
        assert text in shown


def test_commands_say_what_readers_serve(series: Path) -> None:
    assert "snapshot 1 " in run("version", "promote", series, 1)
    assert statuses(series) == [
        ["is_complete", "is_served", "is_pinned"],
        ["is_complete", "is_newest", "is_rollback"],
    ]
    assert "snapshot 2 " in run("version", "rollback", series)
    assert "snapshot 2 " in run("version", "pin", series)
    assert "snapshot 1 " in run("version", "pin", series, 1)
    assert "snapshot 2 " in run("version", "unpin", series)
    assert statuses(series)[1] == ["is_complete", "is_newest", "is_served"]


def test_a_pinned_version_that_is_gone_is_said(series: Path) -> None:
    run("version", "promote", series, 2)
    (series / "000002-delta" / "MANIFEST.json").unlink()
    assert "not there" in run("version", "list", series)


@pytest.mark.parametrize(
    "arguments",
    [
        ["version"],
        ["version", "promote"],
        ["version", "promote", "serve", "first"],
        ["version", "promote", "serve", "0"],
        ["version", "promote", "serve", "--max-auc-loss", "-1"],
        ["version", "rollback", "serve", "1"],
        ["predict", "serve", "feeds.npz"],
        ["predict", "serve", "feeds.npz", "out.npz", "--version", "0"],
    ],
)
def test_arguments_without_a_meaning_exit_with_2(arguments: list[str]) -> None:
    assert CliRunner().invoke(cli.app, arguments).exit_code == 2


@pytest.mark.parametrize(
    ("command", "error", "named"),
    [
        (["version", "promote", "{}", "9"], SnapshotError, "snapshot 9"),
        (["version", "promote", "{}", "--check", "{}/absent.npz"], SettingError, "absent.npz"),
        (["version", "promote", "{}", "--check", "{}/feeds.npz"], SettingError, "'label'"),
        (["version", "promote", "{}", "--check", "{}/feeds.npz", "--label", "ids"], SnapshotError, "SERVING.json"),
        (["predict", "{}", "{}/absent.npz", "{}/out.npz"], SettingError, "absent.npz"),
        (["predict", "{}", "{}/feeds.npz", "{}/out.npz", "--version", "9"], SnapshotError, "snapshot 9"),
        (["predict", "{}", "{}/feeds.npz", "{}/out.npz"], SnapshotError, "SERVING.json"),
    ],
)
def test_what_is_wrong_is_named_and_changes_nothing(
    series: Path, command: list[str], error: type[FleetSparseError], named: str
) -> None:
    np.savez(series / "feeds.npz", ids=np.array([0, 1, 0, 1]))
    with pytest.raises(error, match=named):
        run(*(each.format(series) for each in command))
    assert not (series / "SERVE.json").exists()
    assert not (series / "out.npz").exists()


def test_a_damaged_model_is_not_taken_for_a_series(series: Path) -> None:
    (series / "SERVING.json").write_bytes(b"{}")
    with pytest.raises(SnapshotCorrupt):
        run("version", "list", series)
