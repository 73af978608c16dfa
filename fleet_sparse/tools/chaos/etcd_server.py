"""A server of etcd on a free port of this machine, the coordinator of a chaos job."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path

from fleet_sparse.errors import FleetSparseError

_START_S, _POLL_S = 60.0, 0.05


@contextmanager
def etcd_server(directory: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Runs a server until the end of the block; yields its address `host:port` and its process.

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
    log = directory.with_suffix(".log")
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            _wait_until_reached(client, process, log)
            yield client, process
        finally:
            process.kill()


def _wait_until_reached(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    host, _, port = address.partition(":")
    deadline = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection((host, int(port)), 1).close()
            return
        except OSError:
            time.sleep(_POLL_S)
    raise FleetSparseError(f"chaos: etcd does not start; its log is {log}")


def _free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port: int = listener.getsockname()[1]
        return port
