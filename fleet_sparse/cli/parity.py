"""`fleet-sparse parity`: compares losses on pservers with those of plain Paddle, or a served model with its job."""

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

from .serving_parity import compare_serving
from .terminal import AS_IS, console

_READERS = 2


class OptimizerChoice(StrEnum):
    """Optimizers that `parity` compares."""

    sgd = "sgd"
    adagrad = "adagrad"
    adam = "adam"
    adamw = "adamw"
    adamax = "adamax"
    momentum = "momentum"
    rmsprop = "rmsprop"
    lamb = "lamb"


class ClipChoice(StrEnum):
    """Gradient clips of `parity`: by the norm of each table and parameter, or by the norm of all together."""

    norm = "norm"
    global_norm = "global-norm"


class ModeChoice(StrEnum):
    """Training modes."""

    sync = "sync"
    asynchronous = "async"
    geo = "geo"


class ScaleChoice(StrEnum):
    """The way in which gradients, in geo changes, of several workers are combined."""

    avg = "avg"
    sum = "sum"


_DETAILS: dict[ModeChoice, dict[str, Any]] = {
    ModeChoice.sync: {"scale": "avg"},
    ModeChoice.asynchronous: {"max-step-lag": None},
    ModeChoice.geo: {"scale": "avg", "k-steps": 4},
}
"""The options of each mode with their defaults; None for an option that is left out."""

NOTES = {
    OptimizerChoice.lamb: "lamb: compared with lamb_weight_decay=0.0. Paddle's default 0.01 has a trust ratio for each "
    "parameter; for tables it is refused."
}
"""Optimizers that are compared with other arguments than Paddle's defaults."""

_START_LIMIT_S = 120.0
_STEP_LIMIT_S = 0.1  # per step of one worker, which takes a few milliseconds


class ParityRun(NamedTuple):
    """A job whose losses are compared."""

    servers: int
    workers: int
    steps: int
    mode: ModeChoice
    details: dict[str, Any]
    """Options of the mode, by name."""
    clip: ClipChoice | None

    @property
    def is_exact(self) -> bool:
        """True if the losses of plain Paddle are guaranteed."""
        return self.mode is ModeChoice.sync or self.workers == 1

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


class LossComparison(NamedTuple):
    """The losses of one worker with one optimizer, compared with those of plain Paddle."""

    optimizer: str
    worker: int
    first: float
    last: float
    largest_difference: float
    """Largest difference between two losses of one step; NaN if a loss is NaN."""


def parity(  # noqa: PLR0913, PLR0917  # options of the command
    servers: Annotated[int, typer.Option(min=0, max=64, help="Pserver processes; 0 for one inside the worker.")] = 1,
    workers: Annotated[int, typer.Option(min=1, max=16, help="Worker processes.")] = 1,
    mode: Annotated[ModeChoice, typer.Option(help="Training mode.")] = ModeChoice.sync,
    optimizer: Annotated[OptimizerChoice | None, typer.Option(help="Optimizer to compare; default: all.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of steps.")] = 50,
    scale: Annotated[
        ScaleChoice | None, typer.Option(help="Sync, geo: how gradients or changes of the workers are combined.")
    ] = None,
    max_step_lag: Annotated[int | None, typer.Option(min=0, help="Async: steps that a worker may be ahead.")] = None,
    k_steps: Annotated[int | None, typer.Option(min=1, help="Geo: steps between two exchanges.")] = None,
    clip: Annotated[ClipChoice | None, typer.Option(help="Clip gradients by their norm; default: no clip.")] = None,
    serving: Annotated[
        bool, typer.Option("--serving", help="Compare predictions of the saved model with those of the job instead.")
    ] = False,
    readers: Annotated[
        int | None, typer.Option(min=1, max=64, help="Serving: read-only pserver processes; default 2.")
    ] = None,
) -> None:
    """Trains one model on pservers and in plain Paddle from the same rows, and compares the losses of each step.

    Plain Paddle is one process. It runs the sub-batches of all workers one after the other, merges their gradients,
    and takes one step. In sync mode, and with one worker in any mode, the losses are equal to 1e-6 on any number of
    pservers. With several workers in another mode the differences are shown and not judged. Every batch contains every
    id, because pservers train lazily and Paddle does not.

    With --serving it trains and saves a model, and compares the predictions of the job with those of the plain model,
    the ONNX model and a Predictor on --readers pservers, for a full snapshot and for a delta. They are equal to 1e-6.
    """
    if serving:
        given = {"scale": scale, "max-step-lag": max_step_lag, "k-steps": k_steps}
        _refuse_options_of_training(workers=workers, mode=mode, optimizer=optimizer, clip=clip, **given)
        raise typer.Exit(0 if compare_serving(servers, readers or _READERS, steps) else 1)
    if readers is not None:
        raise typer.BadParameter("is an option of --serving. Leave it out.", param_hint="--readers")
    details = _details(mode, {"scale": scale, "max-step-lag": max_step_lag, "k-steps": k_steps})
    if workers > 1 and not servers:
        raise typer.BadParameter(
            f"is {workers} without pservers, should be 1. Set --servers to 1 or more.", param_hint="--workers"
        )
    job = ParityRun(servers, workers, steps, mode, details, clip)
    chosen = [optimizer] if optimizer else list(OptimizerChoice)
    with console.status("training on pservers and in plain Paddle"):
        plain, trained = _train(job, chosen)
    comparisons, tolerance = _compare(plain, trained), plain["tolerance"]
    console.print(_table(job, comparisons, tolerance))
    if not job.is_exact:
        console.print(f"{mode.value} with several workers: losses depend on timing, so there is no verdict.", **AS_IS)
    for each in chosen:
        if each in NOTES:
            console.print(NOTES[each], **AS_IS)
    if optimizer is None:
        console.print("ftrl: not compared, because Paddle has no optimizer for it.", **AS_IS)
    is_equal = all(each.largest_difference <= tolerance for each in comparisons)
    raise typer.Exit(0 if is_equal or not job.is_exact else 1)


def _refuse_options_of_training(**given: Any) -> None:
    defaults = {"workers": 1, "mode": ModeChoice.sync}
    for name, value in given.items():
        if value != defaults.get(name):
            raise typer.BadParameter("is not an option of --serving. Leave it out.", param_hint=f"--{name}")


def _details(mode: ModeChoice, given: dict[str, Any]) -> dict[str, Any]:
    """The options of a mode: the given ones, which are not None, and defaults. Refuses options of other modes."""
    for name, value in given.items():
        if value is not None and name not in _DETAILS[mode]:
            raise typer.BadParameter(f"is not an option of mode {mode.value}. Leave it out.", param_hint=f"--{name}")
    values = {name: default if given[name] is None else given[name] for name, default in _DETAILS[mode].items()}
    return {name: value for name, value in values.items() if value is not None}


def _train(job: ParityRun, optimizers: list[OptimizerChoice]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Trains in plain Paddle and in all workers at the same time, each in its own process; returns their output."""
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


def _compare(plain: dict[str, Any], trained: list[dict[str, Any]]) -> list[LossComparison]:
    comparisons = []
    for optimizer, expected in plain["trained"].items():
        for worker, of_worker in enumerate(trained):
            losses = of_worker["trained"][optimizer]["losses"]
            differences = [abs(loss - step[worker]) for loss, step in zip(losses, expected["losses"], strict=True)]
            largest = math.nan if any(map(math.isnan, differences)) else max(differences)
            comparisons.append(LossComparison(optimizer, worker, losses[0], losses[-1], largest))
    return comparisons


def _table(job: ParityRun, comparisons: list[LossComparison], tolerance: float) -> Table:
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
