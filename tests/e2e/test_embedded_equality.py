"""A pserver inside the process against one in a process of its own: the same program, the same losses bit by bit."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
import pytest

import fleet_sparse
from fleet_sparse.embedded_client import EmbeddedClient
from fleet_sparse.local_pservers import local_pservers
from fleet_sparse.plugin.active_session import active
from fleet_sparse.worker.net.client import Client
from support.programs import flagged, ids_input, linear

NUM_STEPS = 50
BATCH = 8
PADDING = 3
RULES = {"adam": paddle.optimizer.Adam, "adagrad": paddle.optimizer.Adagrad}


def loss_of(prefix: str) -> Any:
    """Three tables, one of them with padding and one with any number of ids, and a dense layer."""
    items = flagged(ids_input((-1, 4), "item"), f"{prefix}items", None, padding_idx=PADDING)
    rows = [
        paddle.sum(items, axis=1),
        flagged(ids_input((-1,), "user"), f"{prefix}users", None),
        flagged(ids_input((-1,), "user") * 7 % 11, f"{prefix}groups", None),
    ]
    tags = paddle.sum(flagged(ids_input((-1,), "tag"), f"{prefix}tags", None), axis=0, keepdim=True)
    logit = linear(paddle.concat(rows, axis=1), f"{prefix}w") + paddle.sum(tags)
    label = paddle.static.data("label", [-1, 1], "float32")
    return paddle.nn.functional.binary_cross_entropy_with_logits(logit, label)


def batches() -> Iterator[dict[str, np.ndarray]]:
    """Batches with 0, 1, 2 or 3 tags. Every fifth has nothing but padding among its items."""
    rng = np.random.default_rng(5)
    for step in range(NUM_STEPS):
        items = rng.integers(0, 60, (BATCH, 4))
        yield {
            "item": np.full_like(items, PADDING) if step % 5 == 4 else items,
            "user": rng.integers(-9, 9, BATCH),
            "tag": rng.integers(0, 6, step % 4),
            "label": rng.integers(0, 2, (BATCH, 1)).astype(np.float32),
        }


def losses(mode: str, rule: str, client: type) -> list[list[str]]:
    """Losses of a plain program, of one that looks ahead, and of both kinds with a clip by global norm."""
    paddle.enable_static()
    fleet_sparse.install()
    try:
        fleet.init()
        executor = paddle.static.Executor(paddle.CPUPlace())
        programs = []
        for number in range(4):
            main, startup = paddle.static.Program(), paddle.static.Program()
            startup.random_seed = main.random_seed = 1
            with paddle.static.program_guard(main, startup), paddle.utils.unique_name.guard(f"{number}"):
                strategy = fleet_sparse.PserverStrategy()
                strategy.a_sync = mode == "async"
                clip = paddle.nn.ClipGradByGlobalNorm(0.05) if number >= 2 else None
                loss = loss_of(f"of{number}_")
                fleet.distributed_optimizer(RULES[rule](0.05, grad_clip=clip), strategy).minimize(loss)
                executor.run(startup)
            programs.append((main, loss))
        fleet.init_worker()
        assert isinstance(active().connection("test").client, client)
        trained = []
        for number, (main, loss) in enumerate(programs):
            loader = fleet_sparse.look_ahead(batches(), main) if number % 2 else batches()
            trained.append([float(executor.run(main, feed=feed, fetch_list=[loss])[0]).hex() for feed in loader])
        fleet.stop_worker()
        return trained
    finally:
        fleet_sparse.uninstall()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_losses_are_those_of_a_pserver_process_bit_by_bit(
    mode: str, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        stack.enter_context(paddle.static.scope_guard(paddle.static.Scope()))
        embedded = losses(mode, rule, EmbeddedClient)
        pservers = stack.enter_context(local_pservers(1, root=tmp_path, log=subprocess.DEVNULL))
        for name, value in pservers.environment().items():
            monkeypatch.setenv(name, value)
        stack.enter_context(paddle.static.scope_guard(paddle.static.Scope()))
        assert losses(mode, rule, Client) == embedded
    assert [len(set(of_program)) for of_program in embedded] == [NUM_STEPS] * 4
