"""What do pservers on other machines cost a step, and what of it does looking ahead hide?

`python -m benchmarks.link` from the root of a checkout. One worker trains the click model of `benchmarks.step`, or with
`--model lookup` that of `benchmarks.lookup`, with its pservers behind links of 0.1 and 1 ms one way, 1 and 10 Gbit/s:
plainly and behind `look_ahead`, beside its floor, the same program with its rows fed from memory. Everything between
worker and pservers passes a proxy that delays and paces it (`benchmarks/shaped_link.py`), since not every kernel has
`netem`, and what a proxy does is the same everywhere. `--links` chooses others, as `0.1x25`: ms one way and Gbit/s.

The pservers serve as they do other machines: they listen on TCP, and frames carry checksums. Their data plane is bound
to one address of the loopback interface and advertised at another one, by `FLEET_SPARSE_DATA_HOST`, where the proxy
listens. All links belong to one job: before a block of steps the proxy gets the shape of the link. Within a round all
programs and links run once, interleaved. A push that is on the link at the end of a block arrives in the next one, so
steps are compared by their medians. `--baseline` also measures PaddlePaddle 2.6's own parameter server behind the same
links, by a proxy of its own: its servers listen on ports that the benchmark chose, and its trainer knows those of the
proxy. Its trainer waits after each block, untimed, until its servers have what it pushed.

The proxy's processes need cores too, and the CPU time that they use is recorded: measure with at least one core more
than the step uses. Before the first round one connection probes each link: the time of an echo and the rate of each
direction are recorded with the run.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from paddle.distributed import fleet
from rich.console import Console
from rich.table import Table

from benchmarks import lookup, step
from benchmarks.baselines import paddle_steps
from benchmarks.cpu_clock import cpu_seconds
from benchmarks.interleaved import interleaved
from benchmarks.options import AT_LEAST_1, AT_LEAST_2, PSERVERS, amount
from benchmarks.processes import Worker, asked, workers
from benchmarks.programs import FLOOR, PADDLE, behind_name
from benchmarks.record import Record
from benchmarks.step import BATCH, Block, turn
from fleet_sparse.control_socket import ControlSocket
from fleet_sparse.local_pservers import LocalPservers, local_pservers
from fleet_sparse.net_addresses import LOOPBACK, Address

ELSEWHERE = "192.0.2.1:0"
"""An address of no machine: a pserver that finds it in the list of all pservers serves other machines."""
ADVERTISED_HOST, DATA_HOST = "127.0.0.2", "127.0.0.3"
MODELS = {"ctr": step.model, "lookup": lookup.model}
PROBE_S = 0.05
"""Seconds that the bytes of a probe of the rate take on the link."""
NUM_PADDLE_SERVERS = 2
_LISTENING = "0A"  # state of a socket in /proc/net/tcp
_HEADER_BYTES = 16

Round = dict[str, dict[str, Any]]
"""Measurements by name of the program and its link."""


class Shape(NamedTuple):
    """Delay and rate of a link, the same in both directions."""

    delay_ms: float
    """One way."""
    gbit_per_s: float

    def __str__(self) -> str:
        return f"{self.delay_ms:g} ms, {self.gbit_per_s:g} Gbit/s"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses `<ms>x<Gbit/s>`, as a `type` of argparse."""
        delay_ms, _, gbit_per_s = text.partition("x")
        return cls(amount(delay_ms), amount(gbit_per_s))


SHAPES = tuple(Shape(delay_ms, gbit_per_s) for delay_ms in (0.1, 1) for gbit_per_s in (1, 10))


BaselineSteps = Callable[[int], list[float]]
"""Runs that many steps of a baseline and returns their seconds."""


class Link(NamedTuple):
    """A running proxy."""

    process: Worker
    pids: Sequence[int]
    addresses: Sequence[str]
    """`host:port` that leads to each target."""

    def shape(self, shape: Shape) -> None:
        """Changes delay and rate for the bytes that arrive from now on."""
        asked([self.process], f"{shape.delay_ms / 1e3} {shape.gbit_per_s * 1e9}")


class Probe(NamedTuple):
    """Delay and rates that one connection measured on a link."""

    echo_ms: float
    """Median time until a byte is back."""
    up_gbit_per_s: float
    down_gbit_per_s: float


@contextmanager
def shaped_link(routes: Sequence[tuple[str, str]]) -> Iterator[Link]:
    """Runs a proxy as long as the block lasts.

    Args:
        routes: `host:port` to listen on, and the one to connect to, of each target.
    """
    command = ["benchmarks.shaped_link", *("=".join(route) for route in routes)]
    with workers([(command, {})]) as (process,):
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit("the proxy ended: can it listen on its addresses?")
        pids, addresses = json.loads(line)
        yield Link(process, pids, addresses)


def probe(shape: Shape, seconds: float = PROBE_S, echoes: int = 20) -> Probe:
    """Measures a link with one connection to a server in this process.

    Args:
        shape: Delay and rate of the link.
        seconds: Seconds that the bytes of a direction take at that rate.
        echoes: Number of echoes whose median is taken.
    """
    num_bytes = int(seconds * shape.gbit_per_s * 1e9 / 8)
    with socket.create_server((LOOPBACK, 0)) as listener:
        target = "{}:{}".format(*listener.getsockname())
        with shaped_link([(f"{LOOPBACK}:0", target)]) as link:
            link.shape(shape)
            threading.Thread(target=answer, args=(listener,), daemon=True).start()
            host, _, port = link.addresses[0].rpartition(":")
            with socket.create_connection((host, int(port))) as client:
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                echo_s = float(np.median([exchange_s(client, 1, 1) for _ in range(echoes)]))
                delays_s = 2 * shape.delay_ms / 1e3
                rates = [
                    8e-9 * num_bytes / (exchange_s(client, *sizes) - delays_s)
                    for sizes in ((num_bytes, 1), (1, num_bytes))
                ]
    return Probe(1e3 * echo_s, *rates)


def answer(listener: socket.socket) -> None:
    """Answers one client until it closes its connection; each request begins with its size and that of the answer."""
    server, _ = listener.accept()
    server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with server:
        while header := server.recv(_HEADER_BYTES, socket.MSG_WAITALL):
            num_bytes, num_answered = np.frombuffer(header, np.int64).tolist()
            receive(server, num_bytes)
            server.sendall(bytes(num_answered))


def exchange_s(client: socket.socket, num_bytes: int, num_answered: int) -> float:
    """Returns the seconds until a request of that many bytes is answered with that many."""
    request = np.array([num_bytes, num_answered]).tobytes() + bytes(num_bytes)
    begun_at = time.perf_counter()
    client.sendall(request)
    receive(client, num_answered)
    return time.perf_counter() - begun_at


def receive(stream: socket.socket, num_bytes: int) -> None:
    """Receives and drops that many bytes."""
    buffer = memoryview(bytearray(1 << 20))
    while num_bytes:
        num_received = stream.recv_into(buffer, min(num_bytes, len(buffer)))
        if not num_received:
            raise SystemExit(f"the link ended {num_bytes} bytes early")
        num_bytes -= num_received


def free_ports(count: int) -> list[int]:
    """Returns ports of 127.0.0.1 on which nothing listens now."""
    with ExitStack() as stack:
        return [stack.enter_context(socket.create_server((LOOPBACK, 0))).getsockname()[1] for _ in range(count)]


@contextmanager
def pservers_behind_a_link(num_pservers: int) -> Iterator[tuple[LocalPservers, Link]]:
    """Runs pservers, and a proxy to their control and data planes; `endpoints` are those of the proxy."""
    variables = {"FLEET_SPARSE_INSECURE": "1", "FLEET_SPARSE_DATA_HOST": DATA_HOST, "FLEET_SPARSE_CHANNEL": "stream"}
    arguments = ["--control", f"{ADVERTISED_HOST}:0", "--servers", ",".join([ELSEWHERE] * num_pservers)]
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pservers = stack.enter_context(
            local_pservers(num_pservers, root=root, arguments=arguments, environment=variables, log=subprocess.DEVNULL)
        )
        ports = [listening_port(each.process.pid, DATA_HOST) for each in pservers.processes]
        # The worker takes these pservers for ones of its machine, whose control planes have Unix sockets.
        sockets = [stack.enter_context(closing(ControlSocket(Address(LOOPBACK, 0)))) for _ in pservers.endpoints]
        routes = [(str(each.path), endpoint) for each, endpoint in zip(sockets, pservers.endpoints, strict=True)]
        routes += [(f"{ADVERTISED_HOST}:{port}", f"{DATA_HOST}:{port}") for port in ports]
        link = stack.enter_context(shaped_link(routes))
        yield pservers._replace(endpoints=tuple(f"{LOOPBACK}:{each.port}" for each in sockets)), link


def listening_port(pid: int, host: str) -> int:
    """Returns the port on which a process listens at an IPv4 address."""
    sockets = {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()}
    address = socket.inet_aton(host)[::-1].hex().upper()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_, inode = line.split()[:10]
        if state == _LISTENING and local.startswith(f"{address}:") and f"socket:[{inode}]" in sockets:
            return int(local.partition(":")[2], 16)
    raise SystemExit(f"process {pid} does not listen at {host}")


def behind(link: Link, shape: Shape, run_block: Callable[[], Block]) -> dict[str, Any]:
    """Runs a block of steps behind a link; returns what was measured, with the CPU seconds of the proxy."""
    link.shape(shape)
    before = cpu_seconds(link.pids)
    measured = step.as_recorded({"": run_block()})[""]
    return {**measured, "proxy_cpu_s": cpu_seconds(link.pids) - before}


@contextmanager
def paddle_behind_a_link(model: str, python: Path | None) -> Iterator[tuple[BaselineSteps, Link]]:
    """Runs PaddlePaddle 2.6's servers and trainer, and a proxy between them."""
    with ExitStack() as stack:
        ports = free_ports(NUM_PADDLE_SERVERS)
        link = stack.enter_context(shaped_link([(f"{LOOPBACK}:0", f"{LOOPBACK}:{port}") for port in ports]))
        reached_at = [int(address.rpartition(":")[2]) for address in link.addresses]
        job = paddle_steps(model, servers=len(ports), ports=ports, reached_at=reached_at, python=python)
        yield stack.enter_context(job), link


def run(options: argparse.Namespace) -> list[Round]:
    """Starts everything and returns every round but the first."""
    step.apply_program_options(options)
    name, feeds, loss_of = MODELS[options.model](options.batches)
    measured: list[Round] = []
    with ExitStack() as stack:
        pservers, link = stack.enter_context(pservers_behind_a_link(options.pservers))
        pids = [each.process.pid for each in pservers.processes]
        os.environ.update(pservers.environment(), FLEET_SPARSE_CHANNEL="stream")
        ours, ahead, floor = step.start(options.mode, feeds, loss_of, 0)
        behind(link, options.links[-1], partial(step.block, ours, feeds, pids))  # all rows exist from now on
        paddle = stack.enter_context(paddle_behind_a_link(name, options.peer_python)) if options.peer else None
        if paddle:
            paddle[0](len(feeds))
        for number in range(options.rounds):
            blocks: dict[str, Callable[[], dict[str, Any]]] = {}
            run_floor = partial(step.block, floor, turn(floor.feeds, number, options.steps), pids)
            for shape in options.links:
                for each in (ours, ahead):
                    run_ours = partial(step.block, each, turn(each.feeds, number, options.steps), pids)
                    blocks[behind_name(each.name, shape)] = partial(behind, link, shape, run_ours)
                if paddle:
                    run_paddle = partial(step.baseline_block, step.BaselineSteps(paddle[0], options.steps))
                    blocks[behind_name(PADDLE, shape)] = partial(behind, paddle[1], shape, run_paddle)
            blocks[FLOOR] = partial(behind, link, options.links[-1], run_floor)
            measured.append(interleaved(blocks, number))
        fleet.stop_worker()
    return measured[1:]


def show(options: argparse.Namespace, measured: Sequence[Round], probes: Mapping[str, Probe]) -> None:
    """Prints tables of the links and of the programs."""
    links = Table(title="links, by one connection")
    for heading in ("link", "echo ms", "up Gbit/s", "down Gbit/s"):
        links.add_column(heading, justify="right")
    for name, found in probes.items():
        links.add_row(name, *(f"{value:.2f}" for value in found))
    table = Table(title=f"{options.model} step, {options.mode}, OMP {os.environ['OMP_NUM_THREADS']}")
    for heading in ("program", "median ms", "over the floor", "CPU ms over the floor", "proxy CPU ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name in measured[0]:
        seconds = np.concatenate([each[name]["seconds"] for each in measured])
        ratios = [np.median(each[name]["seconds"]) / np.median(each[FLOOR]["seconds"]) for each in measured]
        proxy = np.median([1e3 * each[name]["proxy_cpu_s"] / len(each[name]["seconds"]) for each in measured])
        cells = (f"{1e3 * np.median(seconds):.2f}", f"{np.median(ratios):.3f}", cpu_over_floor(measured, name))
        table.add_row(name, *cells, f"{proxy:.1f}")
    for each in (links, table):
        Console(width=120).print(each)


def cpu_over_floor(measured: Sequence[Round], name: str) -> str:
    """Returns the CPU ms of a step less the floor's, worker + pservers; empty for the floor and for a baseline."""
    if name == FLOOR or "worker_cpu_s" not in measured[0][name]:
        return ""
    ours, base = (np.array([cpu_ms(each[program]) for each in measured]) for program in (name, FLOOR))
    return " + ".join(f"{part:.1f}" for part in np.median(ours - base, axis=0))


def cpu_ms(of_program: Mapping[str, Any]) -> list[float]:
    """Returns the CPU ms of a step: of the worker, and of all pservers."""
    return [1e3 * of_program[part] / len(of_program["seconds"]) for part in ("worker_cpu_s", "pservers_cpu_s")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures a model behind all links and prints tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="ctr", help="model of the step")
    parser.add_argument("--mode", choices=("async", "sync"), default="async", help="mode of training")
    parser.add_argument("--pservers", type=PSERVERS, default=2, help="processes")
    parser.add_argument(
        "--links", type=Shape.parse, nargs="+", default=list(SHAPES), help="as 0.1x10: ms one way, Gbit/s"
    )
    parser.add_argument("--steps", type=AT_LEAST_1, default=10, help="steps of a block")
    parser.add_argument("--rounds", type=AT_LEAST_2, default=21, help="the first is not timed")
    step.add_program_options(parser)
    options = parser.parse_args(arguments)
    named = {**vars(options), "links": [str(shape) for shape in options.links]}
    record = Record("link", argparse.Namespace(**named))
    probes = {str(shape): probe(shape) for shape in options.links}
    measured = run(options)
    show(options, measured, probes)
    record.append(measured, batch=BATCH, probes={name: each._asdict() for name, each in probes.items()})


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
