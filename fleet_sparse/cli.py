"""The command `fleet-sparse`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fleet_sparse import __version__
from fleet_sparse.errors import FleetSparseError
from fleet_sparse.local_pservers import local_pservers

app = typer.Typer(
    name="fleet-sparse",
    help="Parameter-server training for PaddlePaddle 3.x.",
    no_args_is_help=True,
    add_completion=False,
)
console = Console()


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


def _show_version(wanted: bool) -> None:
    if wanted:
        console.print(f"fleet-sparse {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def fleet_sparse(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Parameter-server training for PaddlePaddle 3.x."""


@app.command()
def parity(
    optimizer: Annotated[Optimizer | None, typer.Option(help="Which to compare; all when left out.")] = None,
    servers: Annotated[int, typer.Option(min=0, max=64, help="Pserver processes; 0 is one inside this process.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Batches to train on.")] = 50,
) -> None:
    """Trains one model on pservers and in plain Paddle from the same rows, and compares the losses of each step."""
    optimizers = [optimizer] if optimizer else list(Optimizer)
    table = Table(title=f"{steps} steps, 1 worker, {servers or 'embedded'} pserver{'s' if servers > 1 else ''}")
    for heading in ("optimizer", "first loss", "last loss", "largest difference", "parity"):
        table.add_column(heading, justify="right")
    exact = True
    for each in optimizers:
        with console.status(f"training with {each.value}, on pservers and in plain Paddle"):
            result = _parity_of(each, servers, steps)
        equal = result["largest_difference"] <= result["tolerance"]
        exact &= equal
        numbers = (f"{result['first']:.6f}", f"{result['last']:.6f}", f"{result['largest_difference']:.1e}")
        table.add_row(each.value, *numbers, "yes" if equal else f"NO: above {result['tolerance']:.0e}")
    console.print(table)
    raise typer.Exit(0 if exact else 1)


def _parity_of(optimizer: Optimizer, servers: int, steps: int) -> dict[str, float]:
    """One comparison, in a process of its own: a process is one worker of one job."""
    with ExitStack() as stack:
        environment = dict(os.environ)
        if servers:
            root = Path(stack.enter_context(TemporaryDirectory()))
            pservers = stack.enter_context(local_pservers(servers, root=root, log=subprocess.DEVNULL))
            environment |= pservers.environment()
        command = [sys.executable, "-m", "fleet_sparse.plugin.parity", optimizer.value, str(steps)]
        child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if child.returncode != 0:
        raise FleetSparseError(f"parity: the worker ended with exit code {child.returncode}:\n{child.stderr}")
    result: dict[str, float] = json.loads(child.stdout.splitlines()[-1])
    return result


def main() -> None:
    """The entry point: an error of ours is a message and exit code 1, not a stack trace."""
    try:
        app()
    except FleetSparseError as error:
        Console(stderr=True).print(f"[bold red]fleet-sparse:[/] {escape(str(error))}", highlight=False)
        sys.exit(1)


if __name__ == "__main__":
    main()
