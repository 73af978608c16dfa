"""A server of etcd on a free port of this machine, the coordinator of a chaos job."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path

from fleet_sparse.errors import FleetSparseError

_START_S, _POLL_S = 60.0, 0.05


class EtcdServer:
    """A running server of etcd, which can be killed and started again.

    Args:
        command: What starts it.
        address: Its `host:port` for clients.
        log: File of what it prints.

    Raises:
        FleetSparseError: It does not start.
    """

    def __init__(self, command: Sequence[str], address: str, log: Path) -> None:
        self.address = address
        self._command = command
        self._log = log
        self.start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def start(self) -> None:
        """Starts it, with the data that it had before, and waits until it answers.

        Raises:
            FleetSparseError: It does not start.
        """
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(self._command, stdout=output, stderr=output)
        host, _, port = self.address.partition(":")
        deadline = time.monotonic() + _START_S
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                socket.create_connection((host, int(port)), 1).close()
                return
            except OSError:
                time.sleep(_POLL_S)
        self.kill()
        raise FleetSparseError(f"chaos: etcd does not start; its log is {self._log}")

    def kill(self) -> None:
        """Ends its process with SIGKILL; its data stay."""
        self._process.kill()
        self._process.wait()


@contextmanager
def etcd_server(directory: Path) -> Iterator[EtcdServer]:
    """Runs a server until the end of the block.

    Args:
        directory: Directory for its data; its log is beside it.

    Raises:
        FleetSparseError: etcd is not installed, or does not start.
    """
    if shutil.which("etcd") is None:
        raise FleetSparseError(
            "chaos: there is no program 'etcd' on the PATH. Install it (Debian: etcd-server), or leave the kinds of "
            "faults of the coordinator out (--kind)"
        )
    if find_spec("etcd3gw") is None:
        raise FleetSparseError("chaos: the library etcd3gw is missing. Run pip install 'fleet-sparse[etcd]'")
    client, peer = (f"127.0.0.1:{_free_port()}" for _ in range(2))
    command = ["etcd", "--data-dir", str(directory)]
    command += ["--listen-client-urls", f"http://{client}", "--advertise-client-urls", f"http://{client}"]
    command += ["--listen-peer-urls", f"http://{peer}", "--initial-advertise-peer-urls", f"http://{peer}"]
    command += ["--initial-cluster", f"default=http://{peer}"]
    server = EtcdServer(command, client, directory.with_suffix(".log"))
    try:
        yield server
    finally:
        server.kill()


def _free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port: int = listener.getsockname()[1]
        return port
