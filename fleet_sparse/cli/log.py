"""`fleet-sparse log`: what the logs of pservers hold, whether they are whole, and a snapshot made of them.

What reads logs is imported where it is used: `--help` waits for none of it.
"""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .custom_rules import add_custom_rules
from .terminal import AS_IS, console, print_json

if TYPE_CHECKING:
    from fleet_sparse.snapshot.manifest import ShardFile

Logs = Annotated[
    list[Path],
    typer.Argument(metavar="DIR...", help="Directories `shard-<i>-of-<n>` of logs.", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

app = typer.Typer(
    help="Inspect and verify logs of pservers, and make a snapshot of them.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


def _summary_of(directory: Path, *, reads_rows: bool = False) -> dict[str, Any]:
    """Returns what a log holds; `error` is None if all of it can be read, with `reads_rows` the rows files, too.

    `writer` is the pserver that may write it meanwhile.
    """
    from fleet_sparse.errors import LogCorrupt, SettingError, SnapshotError
    from fleet_sparse.pserver.lease.directory import writer_of
    from fleet_sparse.pserver.log.checkpoint import checkpoint_name, read_checkpoint
    from fleet_sparse.pserver.log.loaded_rows import LoadedRows
    from fleet_sparse.pserver.log.log_format import Kind
    from fleet_sparse.pserver.log.log_reader import LogReader

    kinds: Counter[str] = Counter()
    summary: dict[str, Any] = {"log": str(directory), "error": None, "torn_bytes": 0, "writer": None}
    no_log = f"{directory}: there is no log. Name the directories shard-<i>-of-<n> of a job"
    if not directory.is_dir():
        return {**summary, "error": no_log, "records": {}}
    try:
        writer = writer_of(directory)
        summary["writer"] = None if writer is None else writer.process
        checkpoint = read_checkpoint(directory)
        reader = LogReader(directory, None if checkpoint is None else checkpoint.first_lsn)
        num_bytes, step = 0, 0
        files = [(checkpoint_name(each.first_lsn), each.file) for each in checkpoint.files] if checkpoint else []
        before: Kind | None = None
        for record in reader.records():
            kind = record.head.kind
            if kind is Kind.LOAD:
                rows = LoadedRows.parse(record.body)
                files.append((rows.directory, rows.file))
            elif kind is Kind.VOID and before is Kind.LOAD:
                files.pop()  # a start removes it
            before = kind
            kinds[kind.name] += 1
            num_bytes += record.head.end
            step = max(step, record.head.step)
        for name, file in files if reads_rows else []:
            _read(directory / name, file)
    except (LogCorrupt, SnapshotError, SettingError, OSError) as error:
        return {**summary, "error": str(error), "records": dict(kinds)}
    if reader.identity is None:
        return {**summary, "error": no_log, "records": {}}
    torn = reader.torn
    return {
        **summary,
        "shard": reader.identity.shard,
        "num_shards": reader.identity.num_shards,
        "job": f"{reader.identity.job:016x}",
        "generation": reader.generation,
        "checkpoint": None if checkpoint is None else checkpoint.first_lsn,
        "num_segments": len(reader.paths),
        "newest_lsn": reader.newest_lsn,
        "num_bytes": num_bytes,
        "step": step,
        "torn_bytes": 0 if torn is None else torn.num_bytes,
        "records": dict(kinds),
    }


def _read(directory: Path, expected: ShardFile) -> None:
    """Reads a rows file. Raises as `RowsFile`."""
    from fleet_sparse.snapshot.directory import LocalDirectory
    from fleet_sparse.snapshot.rows_reader import open_rows_file

    with closing(open_rows_file(LocalDirectory(directory).open(expected.file), expected)) as file:
        for _ in file.parts():
            pass


@app.command()
def inspect(logs: Logs, as_json: AsJson = False) -> None:
    """Shows shard, checkpoint, segments, newest step and the number of records of each kind.

    The exit code is 1 if a log is wrong or missing.
    """
    summaries = [_summary_of(each) for each in logs]
    if as_json:
        print_json({"logs": summaries})
    else:
        for summary in summaries:
            console.print((summary["error"] or _text_of(summary)) + _writer_text(summary), **AS_IS)
    raise typer.Exit(1 if any(summary["error"] for summary in summaries) else 0)


@app.command()
def verify(logs: Logs, as_json: AsJson = False) -> None:
    """Reads every byte of logs, and of the rows files of checkpoints and loads, and reports each log as good or bad.

    A torn end is named and good: a restart cuts it off.

    A log that a pserver writes is named as such: it may change while it is read, and then seem bad. The exit code is 1
    if a log is bad.
    """
    summaries = [_summary_of(each, reads_rows=True) for each in logs]
    if as_json:
        print_json(
            {"logs": [{key: each[key] for key in ("log", "error", "torn_bytes", "writer")} for each in summaries]}
        )
    else:
        for summary in summaries:
            state = summary["error"] or f"{summary['log']}: good{_torn_text(summary)}"
            console.print(f"{state}{_writer_text(summary)}", **AS_IS)
    raise typer.Exit(1 if any(summary["error"] for summary in summaries) else 0)


@app.command("to-snapshot")
def to_snapshot(
    target: Annotated[
        str,
        typer.Argument(metavar="TARGET", help="Directory of snapshots; created if missing.", show_default=False),
    ],
    logs: Logs,
    as_json: AsJson = False,
) -> None:
    """Writes a full snapshot of the logs of all shards of a job that is dead.

    A log that a pserver writes is refused. In sync training a shard may be one step ahead of another. In async
    training, with or without a bounded step lag, and in geo training the snapshot has the positions that workers
    reported last, about a second before the end: `resume` and `resumable` continue there, and batches since then are
    trained twice. It has none if workers with a bounded step lag cached rows.
    """
    from fleet_sparse.pserver.admin.log_snapshot import write_snapshot
    from fleet_sparse.snapshot.directory import directory_at
    from fleet_sparse.warm_up import warm_up

    from . import snapshot_report as report

    add_custom_rules()
    warm_up(trains=False)
    directory = directory_at(target)
    manifest = write_snapshot(logs, directory)
    if as_json:
        print_json(report.written_json(str(directory), manifest))
    else:
        console.print(report.written_text(str(directory), manifest), **AS_IS)


def _writer_text(summary: dict[str, Any]) -> str:
    return f"; {summary['writer']} writes it, so it may change while it is read" if summary["writer"] else ""


def _torn_text(summary: dict[str, Any]) -> str:
    return f", torn end of {summary['torn_bytes']} bytes" if summary["torn_bytes"] else ""


def _text_of(summary: dict[str, Any]) -> str:
    records = ", ".join(f"{number} {kind}" for kind, number in sorted(summary["records"].items())) or "none"
    begin = "no checkpoint" if summary["checkpoint"] is None else f"checkpoint at record {summary['checkpoint']}"
    step = f", newest step {summary['step']}" if summary["step"] else ""  # where steps are counted
    return (
        f"{summary['log']}: shard {summary['shard']} of {summary['num_shards']}, hash of the job id {summary['job']}, "
        f"start {summary['generation']}, {begin}, segments: {summary['num_segments']}, records up to "
        f"{summary['newest_lsn']} with {summary['num_bytes']} bytes{_torn_text(summary)}{step}; {records}"
    )
