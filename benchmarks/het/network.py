"""Hosts of a slow network on this machine: a network namespace each, joined by a bridge, with `tbf` on every leg.

Making them needs root and the commands `ip` and `tc`. A token bucket of the kernel bounds the rate in both directions
of a leg; it adds no delay, so a round trip takes tens of microseconds.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fleet_sparse.local_pservers import child_environment

_BURST_BYTES, _LATENCY = 256 << 10, "50ms"
_CONTROL_PORT = 7000
_READY_S, _END_S, _POLL_S = 120.0, 30.0, 0.02
ELSEWHERE = "192.0.2.1:0"
"""An address of no machine: a pserver that finds it in the list of all pservers serves other machines."""


class Host(NamedTuple):
    """A network namespace."""

    namespace: str
    address: str

    def command(self, *arguments: str) -> list[str]:
        """Returns the command that runs this one in the namespace."""
        return ["ip", "netns", "exec", self.namespace, *arguments]

    @property
    def leg(self) -> str:
        """Name of its network interface."""
        return _LEG

    def bytes_of_leg(self) -> tuple[int, int]:
        """Returns the bytes that the kernel counted on its leg, received and sent."""
        of_leg = f"/sys/class/net/{_LEG}/statistics"
        command = self.command("cat", f"{of_leg}/rx_bytes", f"{of_leg}/tx_bytes")
        received, sent = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        return int(received), int(sent)


_LEG = "leg"


def can_make_hosts() -> bool:
    """Returns whether this process may make network namespaces."""
    name = f"fs{secrets.token_hex(4)}"
    try:
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
        if not made.returncode:
            _ip("netns", "del", name)
    except (OSError, subprocess.CalledProcessError):
        return False
    return not made.returncode


@contextmanager
def hosts(count: int, rate: str) -> Iterator[list[Host]]:
    """Makes hosts whose legs have a rate, as `100mbit`; removes them with the block.

    Raises:
        subprocess.CalledProcessError: The kernel or the permissions do not allow it.
    """
    prefix = f"fs{secrets.token_hex(3)}"
    with ExitStack() as stack:
        switch = _namespace(stack, f"{prefix}s")
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        made = []
        for number in range(count):
            host, port = Host(_namespace(stack, f"{prefix}h{number}"), f"10.77.0.{number + 1}"), f"port{number}"
            peer = ("peer", "name", _LEG, "netns", host.namespace)
            _ip("-n", switch, "link", "add", port, "type", "veth", *peer)
            _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", _LEG)
            _ip("-n", host.namespace, "link", "set", _LEG, "up")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            for namespace, device in ((switch, port), (host.namespace, _LEG)):
                bucket = ("tbf", "rate", rate, "burst", str(_BURST_BYTES), "latency", _LATENCY)
                _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *bucket)
            made.append(host)
        yield made


@contextmanager
def pservers_on(places: Sequence[Host], **settings: str) -> Iterator[str]:
    """Runs a pserver on each host, with these variables; yields the list of their addresses, once all are ready."""
    endpoints = [f"{place.address}:{_CONTROL_PORT}" for place in places]
    cluster = str(secrets.randbits(63))
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fleet_sparse-")))
        variables = {"FLEET_SPARSE_ROOT": str(directory), "FLEET_SPARSE_INSECURE": "1", **settings}
        processes = []
        for shard, (place, endpoint) in enumerate(zip(places, endpoints, strict=True)):
            command = [sys.executable, "-m", "fleet_sparse.pserver", "--shard", str(shard)]
            command += ["--num-shards", str(len(places)), "--control", endpoint, "--cluster-id", cluster]
            command += ["--servers", ",".join([ELSEWHERE] * len(places))]
            command += ["--endpoint-file", str(directory / f"endpoint-{shard}")]
            process = subprocess.Popen(
                place.command(*command),
                env=child_environment(**variables),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            stack.callback(partial(_end, process))
            processes.append(process)
        deadline = time.monotonic() + _READY_S
        while not all((directory / f"endpoint-{shard}").exists() for shard in range(len(places))):
            if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
                raise SystemExit("a pserver did not start")
            time.sleep(_POLL_S)
        yield ",".join(endpoints)


def worker_environment(endpoints: str, worker: int, num_workers: int, address: str) -> dict[str, str]:
    """Returns the variables that fleetrun would set for a worker on the host with that address."""
    return {
        "TRAINING_ROLE": "TRAINER",
        "PADDLE_TRAINER_ID": str(worker),
        "PADDLE_TRAINERS_NUM": str(num_workers),
        "PADDLE_TRAINER_ENDPOINTS": ",".join([f"{address}:0"] * num_workers),
        "PADDLE_PSERVERS_IP_PORT_LIST": endpoints,
        "POD_IP": address,
        "PADDLE_PORT": "0",
        "FLEET_SPARSE_INSECURE": "1",
        "FLEET_SPARSE_CHANNEL": "stream",
    }


def _namespace(stack: ExitStack, name: str) -> str:
    _ip("netns", "add", name)
    stack.callback(partial(_ip, "netns", "del", name))
    return name


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "LC_ALL": "C"})


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
