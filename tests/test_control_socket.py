from __future__ import annotations

import fcntl
import os
import socket
import stat
import subprocess
import sys
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from fleet_sparse.control_socket import ControlSocket, has_socket, is_served, socket_path
from fleet_sparse.credentials import NO_KEYS, Credentials
from fleet_sparse.errors import SettingError
from fleet_sparse.net_addresses import Address
from fleet_sparse.settings import Settings

ANY = Address("127.0.0.1", 0)
NOBODY = 65534


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def directory_of(root: Path) -> Path:
    return root / f"fleet_sparse-{os.getuid()}"


def test_directory_is_made_for_its_user_alone(root: Path) -> None:
    path = socket_path(7000)
    assert path == directory_of(root) / "7000.sock"
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_without_a_runtime_directory_temporary_files_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert socket_path(7000).parent == directory_of(tmp_path)


def test_directory_that_is_a_link_is_refused(root: Path) -> None:
    (root / "elsewhere").mkdir(0o700)
    directory_of(root).symlink_to(root / "elsewhere")
    with pytest.raises(SettingError, match="link"):
        socket_path(7000)


@pytest.mark.parametrize("mode", [0o710, 0o707, 0o755])
def test_directory_that_is_open_to_others_is_refused(root: Path, mode: int) -> None:
    directory_of(root).mkdir()
    directory_of(root).chmod(mode)
    with pytest.raises(SettingError, match=f"{mode:o}"):
        socket_path(7000)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory to another user")
def test_directory_of_another_user_is_refused(root: Path) -> None:
    directory_of(root).mkdir(0o700)
    os.chown(directory_of(root), NOBODY, NOBODY)
    with pytest.raises(SettingError, match=str(NOBODY)):
        socket_path(7000)


def test_path_that_is_too_long_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = root / ("d" * 100)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    with pytest.raises(SettingError, match="XDG_RUNTIME_DIR"):
        socket_path(7000)


def test_port_is_reserved_and_nothing_listens_there() -> None:
    with closing(ControlSocket(ANY)) as reserved:
        with pytest.raises(OSError, match=f"{reserved.port}.lock"):
            ControlSocket(Address("127.0.0.1", reserved.port))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", reserved.port))
        port = reserved.port
    ControlSocket(Address("127.0.0.1", port)).close()


def test_nothing_is_left_of_a_socket_that_was_closed(root: Path) -> None:
    ControlSocket(ANY).close()
    assert list(directory_of(root).iterdir()) == []


def test_socket_of_a_killed_process_is_replaced() -> None:
    with closing(ControlSocket(ANY)) as first:
        port, path = first.port, first.path
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
        killed.listen()
    assert path.exists()
    assert not is_served(path)
    with closing(ControlSocket(Address("127.0.0.1", port))):
        assert not path.exists()


def test_socket_of_a_process_that_lives_is_left(root: Path) -> None:
    with closing(ControlSocket(ANY)) as first:
        port, path = first.port, first.path
    with path.with_suffix(".lock").open("w") as lock:  # as of a pserver in another network namespace
        fcntl.flock(lock, fcntl.LOCK_EX)
        path.touch()
        with pytest.raises(OSError, match=f"{port}.lock"):
            ControlSocket(Address("127.0.0.1", port))
        assert path.exists()


def test_port_of_connections_that_linger_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = listener.accept()
        accepted.close()  # this side closes first, so its port stays in TIME_WAIT
        client.close()
    ControlSocket(Address("127.0.0.1", port)).close()


def test_socket_whose_backlog_is_full_is_served(root: Path) -> None:
    path = socket_path(7000)
    with socket.socket(socket.AF_UNIX) as busy, ExitStack() as waiting:
        busy.bind(str(path))
        busy.listen(0)
        for _ in range(3):
            stream = waiting.enter_context(socket.socket(socket.AF_UNIX))
            stream.setblocking(False)
            with suppress(BlockingIOError):
                stream.connect(str(path))
        assert is_served(path)


@pytest.mark.parametrize(
    ("settings", "address", "has"),
    [
        (Settings(), Address("127.0.0.1", 1), True),
        (Settings(), Address("localhost", 1), True),
        (Settings(), Address("10.0.0.1", 1), False),
        (Settings(channel="stream"), Address("127.0.0.1", 1), True),
        (Settings(channel="zmq"), Address("127.0.0.1", 1), False),
    ],
)
def test_only_this_machine_without_zeromq_has_sockets(settings: Settings, address: Address, has: bool) -> None:
    assert (Credentials.of(settings).has_control_sockets and has_socket(address)) is has


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_cannot_connect(root: Path) -> None:
    root.chmod(0o755)
    for parent in list(root.parents)[:3]:
        parent.chmod(0o755)
    with closing(ControlSocket(ANY)) as reserved, socket.socket(socket.AF_UNIX) as served:
        served.bind(str(reserved.path))
        served.listen()
        program = (
            "import os, socket, sys; os.setgid(65534); os.setuid(65534); s = socket.socket(socket.AF_UNIX)\n"
            "try: s.connect(sys.argv[1])\nexcept PermissionError: print('refused')"
        )
        command = [sys.executable, "-c", program, str(reserved.path)]
        found = subprocess.run(command, check=False, capture_output=True, text=True)
        assert found.stdout == "refused\n", found.stderr
        assert is_served(reserved.path)


def test_a_process_with_zeromq_is_told_of_the_socket() -> None:
    with closing(ControlSocket(ANY)) as reserved, socket.socket(socket.AF_UNIX) as served:
        endpoint = f"127.0.0.1:{reserved.port}"
        by_tcp = Credentials(has_control_sockets=False)
        assert by_tcp.fault_of(endpoint) == ""
        served.bind(str(reserved.path))
        served.listen()
        assert "FLEET_SPARSE_CHANNEL" in by_tcp.fault_of(endpoint)
        assert NO_KEYS.fault_of(endpoint) == ""
