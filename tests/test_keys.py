"""Keys of a job, as a process finds them in a directory."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest

from fleet_sparse.errors import SettingError
from fleet_sparse.keys import ROLES, read_keys
from support.job_keys import make_keys


@pytest.mark.parametrize("role", ROLES)
def test_keys_of_every_role_are_read(tmp_path: Path, role: str) -> None:
    keys = read_keys(str(make_keys(tmp_path / "keys")), role)
    assert (keys.role, len(keys.authority)) == (role, 16)
    assert 363 < (keys.expires_at - time.time()) / 86_400 <= 365


def test_all_roles_of_a_directory_have_one_authority(tmp_path: Path) -> None:
    first, second = make_keys(tmp_path / "first"), make_keys(tmp_path / "second")
    assert len({read_keys(str(each), role).authority for each in (first, second) for role in ROLES}) == 2


@pytest.mark.parametrize("file", ["ca.pem", "trainer.pem"])
def test_a_missing_file_is_named(tmp_path: Path, file: str) -> None:
    (make_keys(tmp_path / "keys") / file).unlink()
    with pytest.raises(SettingError, match=file):
        read_keys(str(tmp_path / "keys"), "trainer")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620])
def test_a_key_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = make_keys(tmp_path / "keys") / "trainer.pem"
    path.chmod(mode)
    with pytest.raises(SettingError, match=f"trainer.pem.*{mode:04o}"):
        read_keys(str(tmp_path / "keys"), "trainer")


def test_an_authority_that_others_can_change_is_refused(tmp_path: Path) -> None:
    path = make_keys(tmp_path / "keys") / "ca.pem"
    path.chmod(0o644)
    read_keys(str(tmp_path / "keys"), "trainer")
    path.chmod(0o666)
    with pytest.raises(SettingError, match=r"ca\.pem"):
        read_keys(str(tmp_path / "keys"), "trainer")


@pytest.mark.parametrize("role", ["pserver", "reader"])
def test_an_expired_certificate_is_refused(tmp_path: Path, role: str) -> None:
    make_keys(tmp_path / "keys", days=-1)
    with pytest.raises(SettingError, match=rf"{role}\.pem.*expired"):
        read_keys(str(tmp_path / "keys"), role)


@pytest.mark.parametrize(("days", "num_warnings"), [(6, 1), (8, 0)])
def test_a_week_before_the_end_there_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, days: int, num_warnings: int
) -> None:
    make_keys(tmp_path / "keys", days=days)
    with caplog.at_level(logging.WARNING):
        read_keys(str(tmp_path / "keys"), "trainer")
    assert len(caplog.records) == num_warnings


def test_keys_of_two_authorities_name_both(tmp_path: Path) -> None:
    first, second = make_keys(tmp_path / "first"), make_keys(tmp_path / "second")
    ours, theirs = (read_keys(str(each), "trainer").authority for each in (first, second))
    (first / "ca.pem").write_bytes((second / "ca.pem").read_bytes())
    with pytest.raises(SettingError, match=f"{ours}.*{theirs}"):
        read_keys(str(first), "trainer")


def test_a_renamed_certificate_is_refused(tmp_path: Path) -> None:
    directory = make_keys(tmp_path / "keys")
    os.replace(directory / "reader.pem", directory / "trainer.pem")
    with pytest.raises(SettingError, match="reader"):
        read_keys(str(directory), "trainer")
    os.replace(directory / "trainer.pem", directory / "pserver.pem")
    with pytest.raises(SettingError, match=r"pserver\.pem"):
        read_keys(str(directory), "pserver")


@pytest.mark.parametrize("contents", [b"", b"not a certificate", b"\xff\xfe", "half"])
@pytest.mark.parametrize("file", ["ca.pem", "trainer.pem"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, file: str, contents: bytes | str) -> None:
    path = make_keys(tmp_path / "keys") / file
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if isinstance(contents, str) else contents)
    with pytest.raises(SettingError, match=file):
        read_keys(str(tmp_path / "keys"), "trainer")


def test_a_key_that_does_not_fit_its_certificate_is_refused(tmp_path: Path) -> None:
    directory = make_keys(tmp_path / "keys")
    trainer, reader = (directory / f"{role}.pem" for role in ("trainer", "reader"))
    split = b"-----BEGIN PRIVATE KEY"
    trainer.write_bytes(trainer.read_bytes().split(split)[0] + split + reader.read_bytes().split(split)[1])
    with pytest.raises(SettingError, match=r"trainer\.pem"):
        read_keys(str(directory), "trainer")


def test_contents_of_keys_are_not_printed(tmp_path: Path) -> None:
    assert "PRIVATE" not in repr(read_keys(str(make_keys(tmp_path / "keys")), "trainer"))
