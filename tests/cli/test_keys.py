"""`fleet-sparse keys`: files of keys."""

from __future__ import annotations

import json
import stat
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fleet_sparse import cli
from fleet_sparse.errors import InstallError, SettingError
from fleet_sparse.keys import ROLES, read_keys


def keys(*arguments: object) -> str:
    pytest.importorskip("cryptography")
    result = CliRunner().invoke(cli.app, ["keys", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def shown(directory: Path) -> list[dict[str, str]]:
    found: list[dict[str, str]] = json.loads(keys("show", directory, "--json"))["keys"]
    return found


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_new_keys_are_readable_by_their_user_alone(tmp_path: Path) -> None:
    keys("new", tmp_path / "keys")
    assert mode_of(tmp_path / "keys") == 0o700
    files = sorted((tmp_path / "keys").iterdir())
    assert [path.name for path in files] == ["ca.pem", *sorted(f"{role}.pem" for role in ROLES)]
    assert {mode_of(path) for path in files} == {0o600}


def test_the_key_of_the_authority_is_not_in_the_directory(tmp_path: Path) -> None:
    keys("new", tmp_path / "keys", "--ca", tmp_path / "authority.pem")
    assert b"PRIVATE KEY" not in (tmp_path / "keys" / "ca.pem").read_bytes()
    assert b"PRIVATE KEY" in (tmp_path / "authority.pem").read_bytes()
    assert mode_of(tmp_path / "authority.pem") == 0o600


@pytest.mark.parametrize(("options", "days"), [((), 365), (("--days", 30), 30)])
def test_certificates_expire_after_the_days_that_were_asked_for(
    tmp_path: Path, options: tuple[object, ...], days: int
) -> None:
    keys("new", tmp_path / "keys", *options)
    found = shown(tmp_path / "keys")
    assert [each["role"] for each in found] == ["authority", *sorted(ROLES)]
    left = [datetime.fromisoformat(each["not_after"]) - datetime.now(UTC) for each in found[1:]]
    assert [round(each.total_seconds() / 86_400) for each in left] == [days] * 4


def test_an_added_reader_has_the_same_authority(tmp_path: Path) -> None:
    keys("new", tmp_path / "keys", "--ca", tmp_path / "authority.pem")
    keys("add", "reader", tmp_path / "dashboard", "--ca", tmp_path / "authority.pem")
    assert sorted(path.name for path in (tmp_path / "dashboard").iterdir()) == ["ca.pem", "reader.pem"]
    added, trainer = read_keys(str(tmp_path / "dashboard"), "reader"), read_keys(str(tmp_path / "keys"), "trainer")
    assert added.authority == trainer.authority
    assert {each["authority"] for each in shown(tmp_path / "dashboard")} == {trainer.authority}


def test_no_file_is_replaced(tmp_path: Path) -> None:
    keys("new", tmp_path / "keys", "--ca", tmp_path / "authority.pem")
    before = (tmp_path / "keys" / "reader.pem").read_bytes()
    with pytest.raises(SettingError, match="keys"):
        keys("new", tmp_path / "keys")
    with pytest.raises(SettingError, match=r"authority\.pem"):
        keys("new", tmp_path / "other", "--ca", tmp_path / "authority.pem")
    with pytest.raises(SettingError, match=r"reader\.pem"):
        keys("add", "reader", tmp_path / "keys", "--ca", tmp_path / "authority.pem")
    assert (tmp_path / "keys" / "reader.pem").read_bytes() == before


def test_keys_of_two_authorities_do_not_mix(tmp_path: Path) -> None:
    keys("new", tmp_path / "keys", "--ca", tmp_path / "authority.pem")
    keys("new", tmp_path / "other")
    with pytest.raises(SettingError, match=r"ca\.pem"):
        keys("add", "reader", tmp_path / "other", "--ca", tmp_path / "authority.pem")


def test_the_key_of_the_authority_is_kept_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="--ca"):
        keys("new", tmp_path / "keys", "--ca", tmp_path / "keys" / "authority.pem")
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize("file", ["missing.pem", "keys/ca.pem", "keys/reader.pem"])
def test_a_file_without_the_key_of_an_authority_is_refused(tmp_path: Path, file: str) -> None:
    keys("new", tmp_path / "keys")
    with pytest.raises(SettingError, match=file):
        keys("add", "reader", tmp_path / "more", "--ca", tmp_path / file)


def test_a_directory_without_keys_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"ca\.pem"):
        keys("show", tmp_path)


def test_without_cryptography_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.delitem(sys.modules, "fleet_sparse.tools.authority", raising=False)
    monkeypatch.delattr("fleet_sparse.tools.authority", raising=False)
    result = CliRunner().invoke(cli.app, ["keys", "new", str(tmp_path / "keys")])
    assert isinstance(result.exception, InstallError)
    assert "fleet-sparse[keys]" in str(result.exception)
