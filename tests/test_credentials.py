"""Credentials: what settings name, and which pserver is not reached because of keys."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from fleet_sparse.credentials import NO_KEYS, Credentials
from fleet_sparse.errors import SettingError
from fleet_sparse.keys import READER, TRAINER, read_keys
from fleet_sparse.settings import Settings
from support.job_keys import credentials_of, make_keys


def test_without_keys_a_process_is_a_plain_trainer() -> None:
    assert Credentials.of(Settings()) == NO_KEYS
    assert NO_KEYS.metadata is None


def test_a_role_without_keys_is_said_with_each_call() -> None:
    metadata = Credentials.of(Settings(role="reader")).metadata
    assert metadata is not None
    assert [value for _, value in metadata] == [READER]


@pytest.mark.parametrize("role", ["trainer", "reader", "watcher"])
def test_the_role_selects_the_certificate(tmp_path: Path, role: str) -> None:
    settings = Settings.from_environment(
        {"FLEET_SPARSE_KEYS": str(make_keys(tmp_path / "keys")), "FLEET_SPARSE_ROLE": role}
    )
    credentials = Credentials.of(settings)
    assert credentials.keys is not None
    assert (credentials.keys.role, credentials.role, credentials.metadata) == (role, role, None)


def test_a_pserver_has_its_own_certificate(tmp_path: Path) -> None:
    settings = Settings(keys=str(make_keys(tmp_path / "keys")), role="reader")
    keys = Credentials.of(settings, is_pserver=True).keys
    assert keys is not None
    assert keys.role == "pserver"


@pytest.mark.parametrize(
    ("variable", "value"), [("FLEET_SPARSE_INSECURE", "1"), ("FLEET_SPARSE_CHANNEL", "zmq"), ("FLEET_SPARSE_ROLE", "x")]
)
def test_settings_that_contradict_keys_are_refused(tmp_path: Path, variable: str, value: str) -> None:
    environment = {"FLEET_SPARSE_KEYS": str(make_keys(tmp_path / "keys")), variable: value}
    with pytest.raises(SettingError, match=variable):
        Credentials.of(Settings.from_environment(environment))


def test_unix_sockets_need_no_keys(tmp_path: Path) -> None:
    trainer = credentials_of(make_keys(tmp_path / "keys"), TRAINER)
    assert trainer.has_keys_for("tcp:10.0.0.1:7000")
    assert not trainer.has_keys_for("unix:fleet_sparse-1")
    assert not NO_KEYS.has_keys_for("tcp:10.0.0.1:7000")


# Pservers that are not reached

Serve = Callable[[Callable[[socket.socket], None]], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Handles each connection with a function; returns `host:port`."""
    with ExitStack() as stack:

        def served(handle: Callable[[socket.socket], None]) -> str:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

            def run() -> None:
                with suppress(OSError):
                    while True:
                        stream, _ = listener.accept()
                        with suppress(OSError), closing(stream):
                            handle(stream)

            threading.Thread(target=run, daemon=True).start()
            stack.callback(listener.shutdown, socket.SHUT_RDWR)
            return f"127.0.0.1:{listener.getsockname()[1]}"

        yield served


def tls_server(directory: Path) -> Callable[[socket.socket], None]:
    context = read_keys(str(directory), "pserver").server_context()

    def handle(stream: socket.socket) -> None:
        with context.wrap_socket(stream, server_side=True) as protected:
            protected.recv(1)

    return handle


def test_a_pserver_of_another_authority_is_told_with_both(tmp_path: Path, serve: Serve) -> None:
    ours, theirs = make_keys(tmp_path / "ours"), make_keys(tmp_path / "theirs")
    trainer = credentials_of(ours, TRAINER)
    fault = trainer.fault_of(serve(tls_server(theirs)))
    assert trainer.keys is not None
    assert trainer.keys.authority in fault
    assert read_keys(str(theirs), TRAINER).authority in fault


def test_a_pserver_without_keys_is_told(tmp_path: Path, serve: Serve) -> None:
    trainer = credentials_of(make_keys(tmp_path / "keys"), TRAINER)

    def handle(stream: socket.socket) -> None:
        stream.recv(1)
        stream.sendall(b"HTTP/2 or anything")

    assert "no keys" in trainer.fault_of(serve(handle))


def test_a_pserver_that_is_down_has_no_fault(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
    assert credentials_of(make_keys(tmp_path / "keys"), TRAINER).fault_of(endpoint) == ""
    assert NO_KEYS.fault_of(endpoint) == ""


def test_a_pserver_that_ends_meanwhile_has_no_fault(tmp_path: Path, serve: Serve) -> None:
    """As one that is being started again: the worker tries again."""
    endpoint = serve(lambda stream: None)
    assert credentials_of(make_keys(tmp_path / "keys"), TRAINER).fault_of(endpoint) == ""
    assert NO_KEYS.fault_of(endpoint) == ""


def test_a_process_without_keys_is_told_that_the_pserver_has(tmp_path: Path, serve: Serve) -> None:
    keys = make_keys(tmp_path / "keys")
    assert read_keys(str(keys), TRAINER).authority in NO_KEYS.fault_of(serve(tls_server(keys)))


def test_a_pserver_with_the_same_keys_has_no_fault(tmp_path: Path, serve: Serve) -> None:
    keys = make_keys(tmp_path / "keys")
    context = read_keys(str(keys), "pserver").server_context()

    def handle(stream: socket.socket) -> None:
        with context.wrap_socket(stream, server_side=True) as protected:
            protected.sendall(b"settings")

    assert credentials_of(keys, TRAINER).fault_of(serve(handle)) == ""


def test_a_certificate_that_is_refused_is_told(tmp_path: Path, serve: Serve) -> None:
    keys = make_keys(tmp_path / "keys")
    assert "refuses" in credentials_of(keys, "pserver").fault_of(serve(tls_server(keys)))
