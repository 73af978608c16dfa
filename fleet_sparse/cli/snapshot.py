"""`fleet-sparse snapshot`: what saved snapshots hold, whether they are whole, and other shapes of them.

What reads snapshots is imported where it is used: `--help` waits for none of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleet_sparse.errors import SnapshotError

from . import snapshot_report as report
from .custom_rules import add_custom_rules
from .shrink import MinNorm, MinScore, Tables, UnseenDays, criteria_of, print_shrunk
from .terminal import AS_IS, bar, console, print_json

if TYPE_CHECKING:
    from fleet_sparse.core.dense_spec import DenseSpec
    from fleet_sparse.core.table_spec import TableSpec
    from fleet_sparse.snapshot.reader import SnapshotReader
    from fleet_sparse.snapshot.rows import Rows

_MAX_SHARDS = 16384
_MIN_ID, _MAX_ID = -(1 << 63), (1 << 63) - 1
_WHERE = "Directory of snapshots, for the newest one with all tables, or directory of one snapshot; a path or URL."
_WHERE_ALL = "Directory of snapshots, for all of them, or directory of one snapshot; a path or URL."
_TARGET = "Directory of snapshots that receives the new one; created if missing. A path or URL."
_LIKE = "Snapshot of the job with the specs of tables and dense arrays."
_SPEC = "Spec of the table: the JSON object that `inspect --json` shows, or the name of a file with it."

Where = Annotated[str, typer.Argument(metavar="SNAPSHOT", help=_WHERE, show_default=False)]
Target = Annotated[str, typer.Argument(metavar="TARGET", help=_TARGET, show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Shards = Annotated[
    int | None, typer.Option(min=1, max=_MAX_SHARDS, help="Number of shards of the new snapshot.", show_default=False)
]
Like = Annotated[str | None, typer.Option(metavar="SNAPSHOT", help=_LIKE)]
Spec = Annotated[str | None, typer.Option(metavar="JSON", help=_SPEC)]

app = typer.Typer(
    help="Inspect, verify, compare and convert snapshots.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


class Format(StrEnum):
    """Kind of file that `export` writes."""

    npz = "npz"
    parquet = "parquet"


@app.command()
def inspect(
    where: Where,
    rows: Annotated[int, typer.Option(min=0, help="Number of rows to show of each table.")] = 0,
    ids: Annotated[
        list[int] | None,
        typer.Option("--id", min=_MIN_ID, max=_MAX_ID, help="Show the row of this id. May be repeated."),
    ] = None,
    table: Annotated[str | None, typer.Option(help="Table whose rows are shown. Default: all tables.")] = None,
    as_json: AsJson = False,
) -> None:
    """Shows tables, dense arrays, shards, chain, workers and clients of a snapshot, and some of its rows.

    Only the rows to show are read. Rows are shown in the order of their hash. The number of rows of a chain is unknown
    without reading all of them, so its upper bound is shown, and `num_rows` is null in JSON.
    """
    from fleet_sparse.snapshot.reader import open_content
    from fleet_sparse.tools.snapshots.summary import summary_of

    add_custom_rules()
    with open_content(where) as content:
        summary = summary_of(content)
        names = [content.table(table).spec.name] if table else list(content.tables)
        shown = {name: _shown(content, name, rows, ids or []) for name in names} if rows or ids else {}
    missing = _missing(shown, ids or [])
    if as_json:
        of_rows = {
            "rows": [row for name, blocks in shown.items() for row in report.rows_json(name, blocks)],
            "missing": [{"table": name, "id": id_} for name, id_ in missing],
        }
        print_json({**report.summary_json(summary), **(of_rows if shown else {})})
        return
    for grid in report.summary_tables(summary):
        console.print(grid)
    for name, blocks in shown.items():
        console.print(report.rows_table(name, blocks))
    for name, id_ in missing:
        console.print(f"{name}: no row with id {id_}", **AS_IS)


@app.command()
def verify(
    where: Annotated[str, typer.Argument(metavar="SNAPSHOT", help=_WHERE_ALL, show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Reads every byte of a snapshot, or of all snapshots in a directory, and reports each file as good or bad.

    The exit code is 1 if a file is bad.
    """
    from fleet_sparse.snapshot.directory import directory_at
    from fleet_sparse.tools.snapshots.verify import Verification

    add_custom_rules()
    with bar("reading") as progress:
        verification = Verification(directory_at(where), progress)
        progress.expect(verification.num_bytes)
        reports = list(verification.reports())
    if as_json:
        print_json(report.verify_json(reports))
    else:
        console.print(report.verify_table(reports))
        for error in report.verify_errors(reports):
            console.print(error, **AS_IS)
    raise typer.Exit(0 if all(each.is_good for each in reports) else 1)


@app.command()
def diff(
    first: Annotated[str, typer.Argument(metavar="FIRST", help=_WHERE, show_default=False)],
    second: Annotated[str, typer.Argument(metavar="SECOND", help=_WHERE, show_default=False)],
    tolerance: Annotated[
        float, typer.Option(min=0, help="Largest difference of equal floats; 0: no bit differs.")
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Compares ids, all columns and dense values of two snapshots. The exit code is 0 if they are equal, otherwise 1.

    Number of shards, chain, save id and time may differ.
    """
    from fleet_sparse.snapshot.reader import open_content
    from fleet_sparse.tools.snapshots.diff import diff

    add_custom_rules()
    with (
        bar("first") as progress,
        open_content(first, progress) as one,
        open_content(second) as other,
    ):
        progress.expect(one.num_bytes)
        found = diff(one, other, tolerance=tolerance)
    if as_json:
        print_json(report.diff_json(found))
    else:
        console.print(report.diff_table(found))
        for sentence in report.diff_sentences(found):
            console.print(sentence, **AS_IS)
    raise typer.Exit(0 if found.is_equal else 1)


@app.command()
def reshard(
    source: Where,
    target: Target,
    shards: Annotated[
        int, typer.Option(min=1, max=_MAX_SHARDS, help="Number of shards of the new snapshot.", show_default=False)
    ],
    as_json: AsJson = False,
) -> None:
    """Writes a full snapshot with the same content and another number of shards.

    Loading does not need it: any number of pservers loads what any other number saved. No running job should save to
    the target.
    """
    from fleet_sparse.snapshot.directory import directory_at
    from fleet_sparse.snapshot.reader import open_content
    from fleet_sparse.tools.snapshots.reshard import reshard

    add_custom_rules()
    directory = directory_at(target)
    with bar("reading") as progress, open_content(source, progress) as content:
        progress.expect(content.num_bytes)
        manifest = reshard(content, directory, shards)
    if as_json:
        print_json(report.written_json(str(directory), manifest))
    else:
        console.print(report.written_text(str(directory), manifest), **AS_IS)


@app.command()
def export(
    source: Where,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Directory to write. It is empty or missing.")],
    how: Annotated[
        Format,
        typer.Option(
            "--format", help="parquet: for pyarrow and pandas. npz: for numpy, which reads a whole table into memory."
        ),
    ] = Format.npz,
    tables: Annotated[list[str] | None, typer.Option("--table", help="Export only this table; repeatable.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing export.")] = False,
    as_json: AsJson = False,
) -> None:
    """Writes one file for each table and dense array, and `EXPORT.json`, which lists them.

    In **npz** a table has arrays `ids`, `rows`, `states` and one for each other column, such as `last_update_day`; in
    **Parquet** columns `id`, `row`, `state` (all states of a row, one after another) and the others. A dense array has
    `values` and `states`, or columns `value` and `state`. Nothing is rounded: `import` restores every bit.
    """
    from fleet_sparse.snapshot.directory import directory_at
    from fleet_sparse.snapshot.reader import open_content
    from fleet_sparse.tools.snapshots.exchange import FORMATS, export

    add_custom_rules()
    directory = directory_at(target)
    with bar("reading") as progress, open_content(source, progress) as content:
        progress.expect(content.num_bytes)
        files = export(content, directory, FORMATS[how], tables=tables or [], replace=force)
    if as_json:
        written = [file._asdict() for file in files]
        print_json({"path": str(directory), "format": how.value, "files": written})
    else:
        console.print(report.exported_table(str(directory), files))


@app.command("import")
def import_(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="Directory that `export` wrote, or a .npz or .parquet file.")
    ],
    target: Target,
    shards: Shards = None,
    like: Like = None,
    spec: Spec = None,
    table: Annotated[str | None, typer.Option(help="Name of the table in the file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Writes a full snapshot of the files that `export` or another program wrote.

    Files of `export` contain their specs. For other files, `--like` or `--spec` gives the spec, and `--table` or the
    file name (`table-NAME.npz`) the table. Ids may have any order. Missing states are those of new rows. The default
    number of shards is that of the exported snapshot.
    """
    from fleet_sparse.snapshot.directory import directory_at
    from fleet_sparse.tools.snapshots.exchange import open_export
    from fleet_sparse.tools.snapshots.reshard import write_full

    add_custom_rules()
    specs = _specs(like, spec)
    if spec is not None and table is None:
        table = next(iter(specs))
    directory = directory_at(target)
    with bar("reading") as progress, open_export(source, specs=specs, table=table, on_progress=progress) as opened:
        progress.expect(opened.num_bytes)
        manifest = write_full(opened, directory, shards or opened.num_shards)
    if as_json:
        print_json(report.written_json(str(directory), manifest))
    else:
        console.print(report.written_text(str(directory), manifest), **AS_IS)


@app.command()
def shrink(  # noqa: PLR0913, PLR0917  # the options of the command
    where: Where,
    target: Annotated[str | None, typer.Argument(metavar="TARGET", help=_TARGET, show_default=False)] = None,
    unseen_days: UnseenDays = None,
    min_norm: MinNorm = None,
    min_score: MinScore = None,
    table: Tables = None,
    dry_run: Annotated[bool, typer.Option(help="Report which rows would go, and write nothing.")] = False,
    shards: Shards = None,
    as_json: AsJson = False,
) -> None:
    """Writes a full snapshot without some rows, and reports how many rows go and why.

    A row that two criteria select counts for the first one. The default number of shards is that of the snapshot.
    """
    from fleet_sparse.snapshot.directory import directory_at
    from fleet_sparse.snapshot.reader import open_content
    from fleet_sparse.tools.snapshots.reshard import write_full
    from fleet_sparse.tools.snapshots.shrink import Shrunk

    add_custom_rules()
    criteria = criteria_of(unseen_days, min_norm, min_score)
    if target is None and not dry_run:
        raise typer.BadParameter("name the directory of the new snapshot, or give --dry-run.", param_hint="TARGET")
    with open_content(where) as content:
        shrunk = Shrunk(content, criteria, table or ())
        removals, manifest = shrunk.removals(), None
        if target is not None and not dry_run:
            manifest = write_full(shrunk, directory_at(target), shards or content.manifest.num_shards)
    if as_json:
        print_json(report.shrunk_json(removals, target, manifest))
        return
    print_shrunk(removals, shrunk.unscored() if min_score is not None else ())
    if manifest is not None:
        console.print(report.written_text(str(directory_at(str(target))), manifest), **AS_IS)


@app.command()
def import_paddle(  # noqa: PLR0913, PLR0917  # the options of the command
    source: Annotated[
        Path,
        typer.Argument(metavar="SOURCE", help="Directory that Paddle 2.6 saved, with 000, 001 and so on in it."),
    ],
    target: Annotated[str | None, typer.Argument(metavar="TARGET", help=_TARGET, show_default=False)] = None,
    tables: Annotated[
        list[str] | None, typer.Option("--table", metavar="000=NAME", help="A sparse table and its name here.")
    ] = None,
    dense: Annotated[
        list[str] | None, typer.Option("--dense", metavar="001=NAME", help="A dense table and its name here.")
    ] = None,
    paddle_rules: Annotated[
        list[str] | None,
        typer.Option(
            "--paddle-rule", metavar="000=RULE", help="Rule that trained the table, if its files are ambiguous."
        ),
    ] = None,
    optimizer_step: Annotated[int, typer.Option(min=0, help="Number of trained steps, for dense Adam.")] = 0,
    like: Like = None,
    spec: Spec = None,
    shards: Shards = None,
    as_json: AsJson = False,
) -> None:
    """Writes a full snapshot of tables that the parameter server of Paddle 2.6 saved.

    Its files contain neither names nor rules, so `--like` or `--spec` gives the specs. Without `--table` and `--dense`,
    the content of the directory is shown and nothing is written. The output lists what could not be converted. Needs
    pyarrow: `fleet-sparse[parquet]`.
    """
    from fleet_sparse.snapshot.directory import directory_at
    from fleet_sparse.tools.snapshots.paddle_import import PaddleDense, PaddleTable, import_paddle, paddle_directories

    add_custom_rules()
    found = paddle_directories(source)
    if not tables and not dense:
        if as_json:
            print_json(report.paddle_json(found))
        else:
            console.print(report.paddle_table(found))
        return
    if target is None:
        raise typer.BadParameter("name the directory of the new snapshot.", param_hint="TARGET")
    specs, rules = _specs(like, spec), _pairs(paddle_rules, "--paddle-rule")
    named_tables, named_dense = _pairs(tables, "--table"), _pairs(dense, "--dense")
    directory = directory_at(target)
    with bar("reading") as progress:
        progress.expect(sum(each.num_bytes for each in found if each.name in named_tables))
        try:
            imported = import_paddle(
                source,
                directory,
                tables=[PaddleTable(at, _table_spec(specs, name), rules.get(at)) for at, name in named_tables.items()],
                dense=[PaddleDense(at, _dense_spec(specs, name), optimizer_step) for at, name in named_dense.items()],
                num_shards=shards or 1,
                on_progress=progress,
            )
        except ValueError as error:
            raise typer.BadParameter(f"{error}.") from error
    if as_json:
        print_json(report.imported_json(str(directory), imported))
        return
    console.print(report.written_text(str(directory), imported.manifest), **AS_IS)
    for note in imported.notes:
        console.print(note, **AS_IS)


def _shown(content: SnapshotReader, table: str, count: int, ids: list[int]) -> list[Rows]:
    from fleet_sparse.tools.snapshots.summary import first_rows, rows_of_ids

    found = first_rows(content, table, count) if count else []
    return found + (rows_of_ids(content, table, ids) if ids else [])


def _missing(shown: Mapping[str, list[Rows]], ids: list[int]) -> list[tuple[str, int]]:
    found = {name: {id_ for rows in blocks for id_ in rows.ids.tolist()} for name, blocks in shown.items()}
    return [(name, id_) for name, present in found.items() for id_ in ids if id_ not in present]


def _specs(like: str | None, spec: str | None) -> dict[str, TableSpec | DenseSpec]:
    """Returns the specs of a snapshot, or the given one, by name."""
    from fleet_sparse.core.spec_json import parse_spec
    from fleet_sparse.snapshot.reader import open_content

    if like is not None and spec is not None:
        raise typer.BadParameter("--like and --spec both give specs; use one of them.", param_hint="--spec")
    if spec is not None:
        try:
            parsed = parse_spec(spec if spec.lstrip().startswith("{") else Path(spec).read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            raise typer.BadParameter(f"{error}.", param_hint="--spec") from error
        return {parsed.name: parsed}
    if like is None:
        return {}
    with open_content(like) as content:
        return {name: each.spec for each_of in (content.tables, content.dense) for name, each in each_of.items()}


def _table_spec(specs: Mapping[str, Any], name: str) -> TableSpec:
    from fleet_sparse.core.table_spec import TableSpec

    if not isinstance(specs.get(name), TableSpec):
        raise SnapshotError(f"table {name!r}: no spec. Give a snapshot with --like, or the spec with --spec")
    spec: TableSpec = specs[name]
    return spec


def _dense_spec(specs: Mapping[str, Any], name: str) -> DenseSpec:
    from fleet_sparse.core.dense_spec import DenseSpec

    if not isinstance(specs.get(name), DenseSpec):
        raise SnapshotError(f"dense {name!r}: no spec. Give a snapshot with --like")
    spec: DenseSpec = specs[name]
    return spec


def _pairs(given: list[str] | None, option: str) -> dict[str, str]:
    pairs = [text.partition("=") for text in given or []]
    if wrong := [text for text, (key, _, value) in zip(given or [], pairs, strict=True) if not key or not value]:
        raise typer.BadParameter(f"{wrong[0]!r} should be DIRECTORY=NAME.", param_hint=option)
    return {key: value for key, _, value in pairs}
