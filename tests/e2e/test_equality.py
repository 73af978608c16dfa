"""Losses of a Paddle program: the same bits over every transport, by the straight path of rows or without it, on any
number of pservers, looking ahead or not.

The full grid without Paddle: `tests/worker/test_equality.py`.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
import pytest

import fleet_sparse
from fleet_sparse.local_pservers import local_pservers
from support.programs import flagged, ids_input, minimize, start

NUM_STEPS = 50
DIM = 64
SIZES = (0, 1, 6, 13_000, 6, 40)
"""Examples of a batch, in a cycle. A row and its id have 264 bytes, so those of 13 000 exceed a frame on each of three
pservers."""
ELSEWHERE = "192.0.2.1:0"  # an address of no machine: a pserver that finds it in the list of all of them listens on TCP
FRAMES = {"FLEET_SPARSE_MAX_FRAME_BYTES": str(1 << 20)}
UNIX = {"FLEET_SPARSE_CHANNEL": "stream"}
TCP = {"FLEET_SPARSE_CHANNEL": "stream", "FLEET_SPARSE_INSECURE": "1"}
READABLE = {"FLEET_SPARSE_STRAIGHT_PATH": "0"}
OF_TRANSPORT = {
    "unix": UNIX,
    "tcp": TCP,
    "unix, readable path": UNIX | READABLE,
    "tcp, readable path": TCP | READABLE,
    "zmq": {"FLEET_SPARSE_CHANNEL": "zmq"},
}

Feed = dict[str, np.ndarray[Any, Any]]


def batches() -> Iterator[Feed]:
    rng = np.random.default_rng(7)
    for step in range(NUM_STEPS):
        size = SIZES[step % len(SIZES)]
        yield {
            "item": rng.integers(0, 50 if size < 100 else 2**40, (size, 1)),
            "user": rng.integers(-4, 5, (size, 2)),
            "friend": rng.integers(-4, 5, (size, 1)),
        }


def loss() -> Any:
    """Two tables, one with padding and looked up twice, and a dense layer."""
    item, user, friend = ids_input((-1, 1), "item"), ids_input((-1, 2), "user"), ids_input((-1, 1), "friend")
    rows = [
        flagged(paddle.reshape(item, [-1]), "items", None, size=[10**11, DIM]),
        paddle.sum(flagged(user, "users", None, size=[10**11, 8], padding_idx=0), axis=1),
        flagged(paddle.reshape(friend, [-1]), "users", None, size=[10**11, 8]),
    ]
    weights = paddle.create_parameter([DIM + 16, 1], "float32", name="w")
    return paddle.sum(paddle.tanh(paddle.matmul(paddle.concat(rows, axis=1), weights)) ** 2)  # 0 of an empty batch


def losses_over(
    transport: str, num_shards: int, directory: Path, monkeypatch: pytest.MonkeyPatch, *, looks_ahead: bool
) -> list[bytes]:
    """Trains in a job of its own; returns the bits of every loss."""
    variables = {**FRAMES, **OF_TRANSPORT.get(transport, {})}
    with ExitStack() as stack:
        environment = stack.enter_context(monkeypatch.context())
        if transport != "embedded":
            arguments = ["--servers", ",".join([ELSEWHERE] * num_shards)] if transport.startswith("tcp") else []
            pservers = stack.enter_context(
                local_pservers(
                    num_shards, root=directory, arguments=arguments, environment=variables, log=subprocess.DEVNULL
                )
            )
            variables |= pservers.environment()
        for name, value in variables.items():
            environment.setenv(name, value)
        paddle.enable_static()
        fleet_sparse.install()
        stack.callback(fleet_sparse.uninstall)
        for context in (
            paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()),
            paddle.static.scope_guard(paddle.static.Scope()),
            paddle.utils.unique_name.guard(),
        ):
            stack.enter_context(context)
        paddle.seed(3)
        fleet.init()
        of_batch = loss()
        minimize(of_batch, paddle.optimizer.Adagrad(0.05))
        executor = start()
        feeds = fleet_sparse.look_ahead(batches()) if looks_ahead else batches()
        losses = [executor.run(feed=feed, fetch_list=[of_batch])[0].tobytes() for feed in feeds]
        fleet.stop_worker()
    return losses


@cache
def losses_of_the_plain_loop() -> list[bytes]:
    """Losses with a pserver in this process."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        return losses_over("embedded", 1, Path(), monkeypatch, looks_ahead=False)


QUICK = {
    ("embedded", 1, True),
    ("unix", 2, False),
    ("unix", 2, True),
    ("tcp", 2, False),
    ("tcp", 2, True),
    ("unix, readable path", 2, False),
    ("unix, readable path", 2, True),
    ("tcp, readable path", 2, False),
    ("tcp, readable path", 2, True),
}
"""Ways that all tests run; the rest is slow."""


def ways() -> list[Any]:
    grid = [("embedded", 1), *((transport, num_shards) for transport in OF_TRANSPORT for num_shards in range(1, 5))]
    found = []
    for transport, num_shards in grid:
        for looks_ahead in (False, True):
            way = transport, num_shards, looks_ahead
            found.append(pytest.param(*way, marks=() if way in QUICK else pytest.mark.slow))
    return found


@pytest.mark.guarantee("L1")
@pytest.mark.parametrize(("transport", "num_shards", "looks_ahead"), ways())
def test_losses_are_equal_bit_by_bit(
    transport: str, num_shards: int, looks_ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = losses_over(transport, num_shards, tmp_path, monkeypatch, looks_ahead=looks_ahead)
    assert losses == losses_of_the_plain_loop()


def test_losses_differ_from_step_to_step() -> None:
    empty = SIZES.index(0)
    assert len(set(losses_of_the_plain_loop())) == NUM_STEPS - len(range(empty, NUM_STEPS, len(SIZES))) + 1
