"""Real servers of coordinators, on free ports, with their data in a directory of the test."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from fleet_sparse.tools.chaos.etcd_server import etcd_server

ZOOKEEPER_JARS = "/etc/zookeeper/conf_example:/usr/share/java/*"
START_S = 60.0


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port: int = listener.getsockname()[1]
        return port


def lacks(library: str, program: str) -> str:
    """Returns what is missing for a coordinator; empty if nothing is."""
    if importlib.util.find_spec(library) is None:
        return f"the client library {library} is not installed"
    if shutil.which(program) is None and not Path(program).exists():
        return f"{program} is not installed"
    return ""


@contextmanager
def etcd(directory: Path) -> Iterator[str]:
    """A server of etcd; yields `host:port`."""
    if reason := lacks("etcd3gw", "etcd"):
        pytest.skip(reason)
    with etcd_server(directory) as server:
        yield server.address


@contextmanager
def zookeeper(directory: Path) -> Iterator[str]:
    """A server of ZooKeeper; yields `host:port`."""
    if reason := lacks("kazoo", "java") or lacks("kazoo", "/usr/share/java/zookeeper.jar"):
        pytest.skip(reason)
    port = free_port()
    directory.mkdir()
    configuration = directory.with_suffix(".cfg")
    configuration.write_text(
        f"dataDir={directory}\ntickTime=500\nclientPortAddress=127.0.0.1\nclientPort={port}\nadmin.enableServer=false\n"
    )
    main = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
    with running(
        ["java", "-Xmx128m", "-cp", ZOOKEEPER_JARS, main, str(configuration)], directory.with_suffix(".log"), port
    ):
        yield f"127.0.0.1:{port}"


@contextmanager
def running(command: list[str], log: Path, port: int) -> Iterator[None]:
    """A server, from when it accepts connections until the end of the block."""
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            deadline = time.monotonic() + START_S
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    assert process.poll() is None, log.read_text()
                    assert time.monotonic() < deadline, log.read_text()
                    time.sleep(0.05)
            yield
        finally:
            process.kill()
