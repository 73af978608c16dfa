"""`fleet-sparse keys`: the certificates with which the processes of a job on several machines know each other."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer
from rich.table import Table

from fleet_sparse.errors import InstallError, SettingError

from .terminal import AS_IS, console, print_json

app = typer.Typer(
    help="Make the keys with which the processes of a job know each other.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


class KeyRole(StrEnum):
    """What the owner of a certificate may ask."""

    pserver = "pserver"
    trainer = "trainer"
    reader = "reader"
    watcher = "watcher"


Days = Annotated[int, typer.Option(min=1, max=3650, help="Days until the certificates expire.")]
Directory = Annotated[Path, typer.Argument(metavar="DIRECTORY", show_default=False)]


@app.command()
def new(
    directory: Annotated[
        Path, typer.Argument(metavar="DIRECTORY", help="Created if missing; otherwise empty.", show_default=False)
    ],
    days: Days = 365,
    ca: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keeps the key of the authority in this new file, for `keys add`."),
    ] = None,
) -> None:
    """Writes the keys of a job: a certificate authority, and a certificate and key for each role.

    Copy the directory to every host of the job, and set FLEET_SPARSE_KEYS to it. Without --ca nobody can sign another
    certificate of this authority.
    """
    authority = _authority()
    if directory.is_dir() and any(directory.iterdir()):
        raise SettingError(f"keys: {directory} is not empty. Name another directory")
    if ca is not None and ca.absolute().is_relative_to(directory.absolute()):
        raise SettingError(f"--ca: {ca} is in {directory}, which every host gets. Name a file elsewhere")
    signer = authority.new_authority()
    if ca is not None:
        authority.write_authority(ca, signer)
    authority.write_keys(directory, signer, [each.value for each in KeyRole], days)
    show(directory)


@app.command()
def add(
    role: Annotated[KeyRole, typer.Argument(metavar="ROLE", help="pserver, trainer, reader or watcher.")],
    directory: Annotated[
        Path, typer.Argument(metavar="NAME", help="Directory for it and the authority's certificate.")
    ],
    ca: Annotated[Path, typer.Option(metavar="FILE", help="File of `keys new --ca`.", show_default=False)],
    days: Days = 365,
) -> None:
    """Writes one more certificate and key of a job, as for a host that may only read, or before others expire."""
    authority = _authority()
    authority.write_keys(directory, authority.read_authority(ca), [role.value], days)
    show(directory)


@app.command()
def show(
    directory: Directory, as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False
) -> None:
    """Shows the roles and dates of the certificates in a directory."""
    found = _authority().key_files(directory)
    if as_json:
        print_json({"keys": [{**each._asdict(), "not_after": each.not_after.isoformat()} for each in found]})
        return
    table = Table("file", "role", "expires", "days left", "signed by authority")
    now = datetime.now(UTC)
    for each in found:
        days_left = (each.not_after - now).days
        left = str(days_left) if each.not_after > now else "expired"
        table.add_row(each.file, each.role, each.not_after.strftime("%Y-%m-%d"), left, each.authority)
    console.print(table)
    console.print(f"FLEET_SPARSE_KEYS={directory} on every host of the job", **AS_IS)


def _authority() -> ModuleType:
    try:
        from fleet_sparse.tools import authority
    except ModuleNotFoundError as error:
        raise InstallError(f"keys: {error.name} is not installed; pip install 'fleet-sparse[keys]'") from None
    return authority
