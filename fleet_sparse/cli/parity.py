"""`fleet-sparse parity`: losses on pservers beside those of plain Paddle."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import typer
from rich.table import Table

from fleet_sparse.local_pservers import Child, local_pservers, run_together

from .terminal import AS_IS, console


class Optimizer(StrEnum):
    """What `parity` can train with."""

    sgd = "sgd"
    adagrad = "adagrad"
    adam = "adam"
    adamw = "adamw"
    adamax = "adamax"
    momentum = "momentum"
    rmsprop = "rmsprop"
    lamb = "lamb"


class Clip(StrEnum):
    """How `parity` can have gradients clipped: by the norm of each table and parameter, or by that of all together."""

    norm = "norm"
    global_norm = "global-norm"


class Mode(StrEnum):
    """How the pushes of several workers meet."""

    sync = "sync"
    asynchronous = "async"
    geo = "geo"


class Scale(StrEnum):
    """How the shares of several workers are put together."""

    avg = "avg"
    sum = "sum"


_DETAILS: dict[Mode, dict[str, Any]] = {
    Mode.sync: {"scale": "avg"},
    Mode.asynchronous: {"max-step-lag": None},
    Mode.geo: {"scale": "avg", "k-steps": 4},
}
"""The options of each mode with their defaults; None for without."""


_START_LIMIT_S = 120.0
_STEP_LIMIT_S = 0.1  # of one worker; it takes some milliseconds


class _Job(NamedTuple):
    """A training whose losses are compared."""

    servers: int
    workers: int
    steps: int
    mode: Mode
    details: dict[str, Any]
    """Options of the mode by name."""
    clip: Clip | None

    @property
    def is_exact(self) -> bool:
        """Whether the losses of plain Paddle are promised."""
        return self.mode is Mode.sync or self.workers == 1

    def __str__(self) -> str:
        details = ", ".join(f"{name} {value}" for name, value in self.details.items())
        return ", ".join(
            [
                f"{self.steps} steps",
                f"{self.mode.value} ({details})" if details else self.mode.value,
                *([f"clip by {self.clip}"] if self.clip else []),
                f"{self.workers} worker{'s' if self.workers > 1 else ''}",
                f"{self.servers or 'embedded'} pserver{'s' if self.servers > 1 else ''}",
            ]
        )


class _Comparison(NamedTuple):
    """The losses of one worker with one optimizer, beside those of plain Paddle."""

    optimizer: str
    worker: int
    first: float
    last: float
    largest_difference: float
    """Of the losses of one step; NaN if one is."""


def parity(  # noqa: PLR0913, PLR0917  # the options of the command
    servers: Annotated[int, typer.Option(min=0, max=64, help="Pserver processes; 0 is one inside the worker.")] = 1,
    workers: Annotated[int, typer.Option(min=1, max=16, help="Worker processes.")] = 1,
    mode: Annotated[Mode, typer.Option(help="How the workers' pushes meet.")] = Mode.sync,
    optimizer: Annotated[Optimizer | None, typer.Option(help="Which to compare; all when left out.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Batches to train on.")] = 50,
    scale: Annotated[Scale | None, typer.Option(help="Sync, geo: how the workers' shares are put together.")] = None,
    max_step_lag: Annotated[int | None, typer.Option(min=0, help="Async: steps ahead of the slowest worker.")] = None,
    k_steps: Annotated[int | None, typer.Option(min=1, help="Geo: steps between two exchanges.")] = None,
    clip: Annotated[Clip | None, typer.Option(help="Clips gradients by their norm; not when left out.")] = None,
) -> None:
    """Trains one model on pservers and in plain Paddle from the same rows, and compares the losses of each step.

    Plain Paddle is one process: it takes the sub-batches of all workers one after the other, merges their gradients,
    and lets its optimizer take one step. In sync mode each worker has the same losses, to 1e-6, on any number of
    pservers; in the other modes one worker alone has. Of several the differences are shown and not judged.
    """
    details = _details(mode, {"scale": scale, "max-step-lag": max_step_lag, "k-steps": k_steps})
    if workers > 1 and not servers:
        raise typer.BadParameter(f"{workers} workers need a --servers of 1 or more.", param_hint="--workers")
    job = _Job(servers, workers, steps, mode, details, clip)
    with console.status("training on pservers, and beside it in plain Paddle"):
        plain, trained = _train(job, [optimizer] if optimizer else list(Optimizer))
    comparisons, tolerance = _compare(plain, trained), plain["tolerance"]
    console.print(_table(job, comparisons, tolerance))
    if not job.is_exact:
        console.print(
            f"{mode.value} with several workers: what each sees depends on time, so nothing is judged.", **AS_IS
        )
    if optimizer is None:
        console.print("ftrl: not compared, Paddle has no class for it.", **AS_IS)
    is_equal = all(each.largest_difference <= tolerance for each in comparisons)
    raise typer.Exit(0 if is_equal or not job.is_exact else 1)


def _details(mode: Mode, given: dict[str, Any]) -> dict[str, Any]:
    """The options of a mode, from those that were given, None for those that were not; refuses those of other modes."""
    for name, value in given.items():
        if value is not None and name not in _DETAILS[mode]:
            raise typer.BadParameter(f"mode {mode.value} has no such option; leave it out.", param_hint=f"--{name}")
    values = {name: default if given[name] is None else given[name] for name, default in _DETAILS[mode].items()}
    return {name: value for name, value in values.items() if value is not None}


def _train(job: _Job, optimizers: list[Optimizer]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What plain Paddle and each worker print; all train at the same time, each in a process of its own."""
    command = [sys.executable, "-m", "fleet_sparse.tools.parity.training", *optimizers, "--steps", str(job.steps)]
    command += ["--mode", job.mode, *(f"--{name}={value}" for name, value in job.details.items())]
    command += ["--clip", job.clip] if job.clip else []
    one_thread = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with ExitStack() as stack:
        roles: list[dict[str, str]] = [{}]
        if job.servers:
            root = Path(stack.enter_context(TemporaryDirectory()))
            pservers = stack.enter_context(local_pservers(job.servers, root=root, log=subprocess.DEVNULL))
            roles = [pservers.environment(worker, job.workers) for worker in range(job.workers)]
        children = [Child(f"worker {worker}", command, one_thread | role) for worker, role in enumerate(roles)]
        children.append(Child("plain Paddle", [*command, "--plain", str(job.workers)], one_thread))
        outputs = run_together(
            children, limit_s=_START_LIMIT_S + _STEP_LIMIT_S * job.steps * len(optimizers) * job.workers
        )
    *trained, plain = (json.loads(output.splitlines()[-1]) for output in outputs)
    return plain, trained


def _compare(plain: dict[str, Any], trained: list[dict[str, Any]]) -> list[_Comparison]:
    comparisons = []
    for optimizer, expected in plain["trained"].items():
        for worker, of_worker in enumerate(trained):
            losses = of_worker["trained"][optimizer]["losses"]
            differences = [abs(loss - step[worker]) for loss, step in zip(losses, expected["losses"], strict=True)]
            largest = math.nan if any(map(math.isnan, differences)) else max(differences)
            comparisons.append(_Comparison(optimizer, worker, losses[0], losses[-1], largest))
    return comparisons


def _table(job: _Job, comparisons: list[_Comparison], tolerance: float) -> Table:
    table = Table(title=str(job))
    for heading in ("optimizer", "worker", "first loss", "last loss", "max difference", "parity"):
        table.add_column(heading, justify="right", no_wrap=heading == "parity")
    for each in comparisons:
        is_equal = each.largest_difference <= tolerance
        verdict = ("yes" if is_equal else f"NO: above {tolerance:.0e}") if job.is_exact else "not judged"
        numbers = (f"{each.first:.6f}", f"{each.last:.6f}", f"{each.largest_difference:.1e}")
        is_last = each.worker == job.workers - 1
        table.add_row(each.optimizer, str(each.worker), *numbers, verdict, end_section=is_last and job.workers > 1)
    return table
