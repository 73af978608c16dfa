"""Connections of another process that are cut from outside."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fleet_sparse.errors import FleetSparseError
from fleet_sparse.tools.chaos.connection_cut import cut_connections

_SERVER = """
import socket, sys
listening = socket.socket(fileno=int(sys.argv[1]))
own, other = socket.socketpair()
print("ready", flush=True)
for _ in range(2):
    accepted, _ = listening.accept()
    print("accepted", flush=True)
    print("got", len(accepted.recv(100)), flush=True)
    other.send(b"it lives")
    print(own.recv(100).decode(), flush=True)
"""


@pytest.mark.parametrize("family", [socket.AF_UNIX, socket.AF_INET], ids=["Unix socket", "TCP"])
def test_cut_ends_connections_and_leaves_other_sockets(tmp_path: Path, family: socket.AddressFamily) -> None:
    with socket.socket(family) as listening:
        listening.bind(str(tmp_path / "socket") if family is socket.AF_UNIX else ("127.0.0.1", 0))
        listening.listen()
        command = [sys.executable, "-c", _SERVER, str(listening.fileno())]
        with subprocess.Popen(command, pass_fds=[listening.fileno()], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            for _ in range(2):
                with socket.socket(family) as client:
                    client.connect(listening.getsockname())
                    assert process.stdout.readline() == "accepted\n"
                    try:
                        assert cut_connections(process.pid) == 1
                    except FleetSparseError as error:
                        process.kill()
                        pytest.skip(str(error))
                    assert client.recv(100) == b""
                    assert [process.stdout.readline() for _ in range(2)] == ["got 0\n", "it lives\n"]
            assert process.wait() == 0


def test_cut_of_a_process_that_ended_is_an_error() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    with pytest.raises(ProcessLookupError):
        cut_connections(process.pid)
