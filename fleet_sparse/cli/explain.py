"""`fleet-sparse explain`: why an id has a row, or has none."""

from __future__ import annotations

from typing import Annotated

import typer

from .custom_rules import add_custom_rules
from .terminal import AS_IS, console, print_json

_MIN_ID, _MAX_ID = -(1 << 63), (1 << 63) - 1
_WHERE = "Directory of snapshots, for the newest one with all tables, or directory of one snapshot; a path or URL."


def explain(
    where: Annotated[str, typer.Argument(metavar="SNAPSHOT", help=_WHERE, show_default=False)],
    ids: Annotated[list[int], typer.Argument(metavar="ID...", min=_MIN_ID, max=_MAX_ID, show_default=False)],
    table: Annotated[str | None, typer.Option(help="Table of the ids. Default: all tables.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Explains from a snapshot why ids have a row or none: last push, counts, and what the entry policy says.

    Only the blocks of the ids are read. To explain ids of a running job, save a delta first. Write `--` before negative
    ids.
    """
    from fleet_sparse.snapshot.reader import open_content
    from fleet_sparse.tools.snapshots.explain import explain as explained

    add_custom_rules()
    with open_content(where) as content:
        names = [name for name, each in content.tables.items() if each.spec.counts_for is None]
        if table is not None:
            names = [content.table(table).spec.name]
        found = [explained(content, name, id_) for name in names for id_ in ids]
    if as_json:
        rows = [
            {**each._asdict(), "entry": None if each.entry is None else str(each.entry), "reason": each.reason}
            for each in found
        ]
        print_json({"ids": [{("id" if key == "id_" else key): value for key, value in row.items()} for row in rows]})
        return
    for each in found:
        shard = "" if each.shard is None else f", shard {each.shard}"
        console.print(f"{each.table}: id {each.id_}, bucket {each.bucket}{shard}. {each.reason}", **AS_IS)
