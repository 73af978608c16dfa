"""The command line of one pserver process."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from fleet_sparse.custom_rules import add_rules
from fleet_sparse.errors import FleetSparseError, LeaseLost, LogFailed
from fleet_sparse.lifeline import TRY_AGAIN, take_lifeline
from fleet_sparse.net_addresses import Address
from fleet_sparse.settings import Settings

from .server import Options, serve
from .supervised import SUPERVISED


def run(  # noqa: PLR0913, PLR0917  # each is an option
    shard: Annotated[int, typer.Option(help="Index of this pserver's shard, from 0.")],
    num_shards: Annotated[int, typer.Option(help="Number of pservers of the job.")],
    control: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address of its control plane; port 0 for any free port.")
    ],
    servers: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT,...", help="Addresses of all pservers, in order. Needed if there are several."),
    ] = None,
    load: Annotated[str | None, typer.Option(metavar="DIRNAME", help="Snapshot to start from.")] = None,
    load_table: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A table to load, of those in the snapshot; all without.")
    ] = None,
    read_only: Annotated[
        bool,
        typer.Option("--read-only", help="Serve the newest snapshot of --load, and those that follow; trains nothing."),
    ] = False,
    cluster_id: Annotated[
        int | None, typer.Option(min=0, max=(1 << 64) - 1, help="Number of the job; by default a hash of --servers.")
    ] = None,
    endpoint_file: Annotated[
        Path | None, typer.Option(help="File that gets the bound control address once the pserver is ready.")
    ] = None,
    supervised: Annotated[
        bool, typer.Option(SUPERVISED, help="Start the pserver again when it dies, as fleet.run_server() does.")
    ] = False,
    generation: Annotated[int | None, typer.Option(hidden=True)] = None,
    is_restart: Annotated[bool, typer.Option("--is-restart", hidden=True)] = False,
    recover: Annotated[str | None, typer.Option(hidden=True)] = None,
    log_job_id: Annotated[str, typer.Option(hidden=True)] = "",
    written: Annotated[str | None, typer.Option(hidden=True)] = None,
    written_by: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Serve one shard of every table until stopped. Settings are FLEET_SPARSE_* environment variables."""
    lifeline = take_lifeline()
    if lifeline is not None:
        lifeline.note_progress()
    try:
        settings = Settings.from_environment()
        add_rules(settings.rules)
        logging.basicConfig(
            level=settings.log_level,
            format=f"%(asctime)s %(levelname)s pserver {shard}: %(message)s",
        )
        address = Address.parse(control)
        addresses = tuple(Address.parse(text) for text in servers.split(",")) if servers else (address,)
        serve(
            Options(
                shard,
                num_shards,
                address,
                addresses,
                load,
                tuple(load_table or ()),
                cluster_id,
                endpoint_file,
                read_only,
                lifeline,
                generation,
                is_restart,
                recover,
                log_job_id,
                written,
                written_by,
            ),
            settings,
        )
    except FleetSparseError as error:
        print(f"pserver {shard}: {type(error).__name__}: {error}", file=sys.stderr)
        may_pass = isinstance(error, LeaseLost | LogFailed) and lifeline is not None
        raise typer.Exit(TRY_AGAIN if may_pass else 1) from None
    except Exception:
        if lifeline is None:
            raise
        logging.getLogger(__name__).exception("the pserver died")
        raise typer.Exit(TRY_AGAIN) from None


def main() -> None:
    """Runs the command line, and ends the process."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(run)
    code = 1
    try:
        app(prog_name="python -m fleet_sparse.pserver")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except Exception:
        traceback.print_exc()
    # All is closed, and at the end of the interpreter threads of libraries may wait for each other for ever.
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody may read them any more
            if stream is not None:
                stream.flush()
    os._exit(code)
