"""The command `fleet-sparse`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from fleet_sparse import __version__
from fleet_sparse.errors import FleetSparseError

from . import parity, plan, snapshot, warm_up
from .terminal import console

__all__ = ["app", "main"]

app = typer.Typer(
    name="fleet-sparse",
    help="Parameter-server training for PaddlePaddle 3.x.",
    no_args_is_help=True,
    rich_markup_mode="markdown",  # paragraphs of a help text are wrapped anew
    add_completion=False,
)
app.command()(parity.parity)
app.command()(plan.plan)
app.command()(warm_up.warm_up)
app.add_typer(snapshot.app, name="snapshot")


def _show_version(wanted: bool) -> None:
    if wanted:
        console.print(f"fleet-sparse {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def fleet_sparse(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Parameter-server training for PaddlePaddle 3.x."""


def main() -> None:
    """The entry point: an error of ours is a message and exit code 2, not a stack trace.

    1 is left to the commands whose answer is no: not equal, not good.
    """
    try:
        app()
    except FleetSparseError as error:
        Console(stderr=True).print(f"[bold red]fleet-sparse:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
