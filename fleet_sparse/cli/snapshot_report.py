"""Output of `fleet-sparse snapshot`: tables for people, JSON values for programs.

A float that is not finite is null in JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import JustifyMethod
from rich.table import Table

if TYPE_CHECKING:
    from fleet_sparse.core.criteria import Removal
    from fleet_sparse.snapshot.manifest import Manifest, ShardFile
    from fleet_sparse.snapshot.rows import Rows
    from fleet_sparse.tools.snapshots.diff import DenseDiff, Diff, Differences, TableDiff
    from fleet_sparse.tools.snapshots.exchange import ExportedFile
    from fleet_sparse.tools.snapshots.paddle_import import Imported, PaddleDirectory
    from fleet_sparse.tools.snapshots.summary import DenseSummary, Summary, TableSummary
    from fleet_sparse.tools.snapshots.verify import SnapshotReport

_MAX_FLOATS = 6
"""Number of floats of a row that a terminal shows."""


def _grid(title: str, *headings: str, left: Iterable[str] = ()) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in headings:
        justify: JustifyMethod = "left" if heading in {headings[0], *left} else "right"
        table.add_column(heading, justify=justify, no_wrap=heading in ("saved at", "file", "snapshot"))
    return table


def bytes_text(num_bytes: float) -> str:
    """Formats a number of bytes for people."""
    size = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


# inspect


def summary_json(summary: Summary) -> dict[str, Any]:
    """Output of `inspect` as JSON values."""
    return {
        "path": summary.origin,
        "snapshot": summary.snapshot,
        "is_whole": summary.is_complete,
        "num_bytes": sum(link.num_bytes for link in summary.chain),
        "chain": [link._asdict() for link in summary.chain],
        "tables": [_table_json(table) for table in summary.tables],
        "dense": [_dense_json(dense) for dense in summary.dense],
        "shards": [_shard_json(shard) for shard in summary.shards],
        "workers": [msgspec.structs.asdict(position) for position in summary.workers],
    }


def _table_json(table: TableSummary) -> dict[str, Any]:
    spec = table.spec
    return {
        "name": spec.name,
        "dim": spec.dim,
        "rule": spec.rule,
        "num_states": spec.update_rule.num_states,
        "optimizer_step": table.optimizer_step,
        "days": table.num_days,
        "columns": [column.name for column in table.columns],
        "num_rows": table.num_rows,
        "num_stored_rows": table.num_stored_rows,
        "num_removed": table.num_removed,
        "num_bytes": table.num_bytes,
        "bytes_per_row": table.num_bytes / table.num_stored_rows if table.num_stored_rows else None,
        "spec": json.loads(spec.to_json()),
    }


def _dense_json(dense: DenseSummary) -> dict[str, Any]:
    spec = dense.spec
    return {
        "name": spec.name,
        "rule": spec.rule,
        "num_values": spec.num_values,
        "num_states": spec.update_rule.num_states,
        "optimizer_step": dense.optimizer_step,
        "assigned": dense.assigned,
        "spec": json.loads(spec.to_json()),
    }


def _shard_json(file: ShardFile) -> dict[str, Any]:
    clients = [{**mark._asdict(), "client_id": mark.client_id.hex()} for mark in file.clients]
    return {**msgspec.structs.asdict(file), "checksum": str(file.checksum), "clients": clients}


def summary_tables(summary: Summary) -> list[Table]:
    """Output of `inspect` for a terminal."""
    grids = [_chain_table(summary), _tables_table(summary.tables), _shards_table(summary.shards)]
    if summary.dense:
        dense = _grid("Dense arrays", "name", "rule", "values", "parameters", "states", "step", left=["rule"])
        for each in summary.dense:
            spec = each.spec
            counts = (f"{spec.num_values:,}", f"{len(spec.segments):,}", str(spec.update_rule.num_states))
            dense.add_row(spec.name, spec.rule, *counts, str(each.optimizer_step) if each.assigned else "not assigned")
        grids.insert(2, dense)
    if summary.workers:
        workers = _grid("Workers", "worker", "step", "position", left=["position"])
        for mark in summary.workers:
            position = "" if mark.position is None else json.dumps(mark.position)
            workers.add_row(str(mark.worker), str(mark.step), position)
        grids.append(workers)
    return grids


def _chain_table(summary: Summary) -> Table:
    grid = _grid(
        f"{summary.origin}", "snapshot", "saved at", "shards", "rows", "removed ids", "size", left=["saved at"]
    )
    for link in summary.chain:
        counts = (str(link.num_shards), f"{link.num_rows:,}", f"{link.num_removed:,}")
        grid.add_row(link.snapshot, link.saved_at, *counts, bytes_text(link.num_bytes))
    if not summary.is_complete:
        grid.caption = "Only some tables of the job were saved: it cannot be the base of a delta."
    return grid


def _tables_table(tables: Sequence[TableSummary]) -> Table:
    headings = ("name", "dim", "rule", "rows", "state floats", "size", "bytes a row", "step", "days")
    grid = _grid("Tables", *headings, left=["rule"])
    for table in tables:
        spec, stored = table.spec, table.num_stored_rows
        grid.add_row(
            spec.name,
            str(spec.dim),
            spec.rule,
            f"{stored:,}" if table.num_rows is not None else f"up to {stored:,}",
            str(spec.update_rule.num_states * spec.dim),
            bytes_text(table.num_bytes),
            f"{table.num_bytes / stored:.1f}" if stored else "",
            str(table.optimizer_step),
            str(table.num_days),
        )
    return grid


def _shards_table(files: Sequence[ShardFile]) -> Table:
    grid = _grid(
        "Shards", "shard", "file", "rows", "removed ids", "size", "clients", "pushes", left=["file", "clients"]
    )
    for file in files:
        counts = (f"{file.num_rows:,}", f"{file.num_removed:,}", bytes_text(file.num_bytes))
        clients = "\n".join(f"{mark.client_id.hex()[:8]} epoch {mark.epoch}" for mark in file.clients)
        pushes = "\n".join(f"{mark.watermark:,}" for mark in file.clients)
        grid.add_row(str(file.shard), file.file, *counts, clients, pushes)
    return grid


# Rows


def rows_json(table: str, blocks: Iterable[Rows]) -> list[dict[str, Any]]:
    """Rows of a table as JSON values."""
    from fleet_sparse.core.columns import ROWS

    return [
        {
            "table": table,
            "id": id_,
            "row": _finite_values(rows.rows[number].tolist()),
            **{name: _finite_values(array[number].tolist()) for name, array in rows.columns.items() if name != ROWS},
        }
        for rows in blocks
        for number, id_ in enumerate(rows.ids.tolist())
    ]


def rows_table(table: str, blocks: Sequence[Rows]) -> Table:
    """Rows of a table for a terminal."""
    from fleet_sparse.core.columns import ROWS, STATES

    others = [name for name in (blocks[0].columns if blocks else ()) if name not in (ROWS, STATES)]
    grid = _grid(f"Rows of {table}", "id", "row", "states", *others, left=["row", "states"])
    for rows in blocks:
        for number, id_ in enumerate(rows.ids.tolist()):
            states = "\n".join(_floats(state.tolist()) for state in rows.states[number])
            shown = [str(rows.columns[name][number]) for name in others]
            grid.add_row(str(id_), _floats(rows.rows[number].tolist()), states, *shown)
    return grid


def _finite_values(value: Any) -> Any:
    """Returns the value, or nested lists of values, with None for a float that is not finite."""
    if isinstance(value, list):
        return [_finite_values(each) for each in value]
    return _finite(value) if isinstance(value, float) else value


def _floats(values: list[float]) -> str:
    shown = " ".join(f"{value:.6g}" for value in values[:_MAX_FLOATS])
    return shown if len(values) <= _MAX_FLOATS else f"{shown} and {len(values) - _MAX_FLOATS} more"


# verify


def verify_json(reports: Sequence[SnapshotReport]) -> dict[str, Any]:
    """Output of `verify` as JSON values."""
    return {
        "is_good": all(report.is_good for report in reports),
        "num_bytes": sum(file.num_bytes for report in reports for file in report.files),
        "snapshots": [
            {
                "snapshot": report.name,
                "is_good": report.is_good,
                "error": report.error,
                "files": [file._asdict() for file in report.files],
            }
            for report in reports
        ],
    }


def verify_table(reports: Sequence[SnapshotReport]) -> Table:
    """Output of `verify` for a terminal."""
    grid = _grid("", "snapshot", "file", "size", "verdict", left=["file", "verdict"])
    for report in reports:
        for file in report.files:
            name = file.path.rpartition("/")[2]
            size = bytes_text(file.num_bytes) if file.num_bytes else ""
            grid.add_row(report.name, name, size, "good" if file.error is None else "BAD")
        if report.error is not None:
            grid.add_row(report.name, "all files", "", "BAD")
    return grid


def verify_errors(reports: Sequence[SnapshotReport]) -> list[str]:
    """Returns one sentence for each error."""
    return [
        error
        for report in reports
        for error in (*(file.error for file in report.files), report.error)
        if error is not None
    ]


# diff


def diff_json(diff: Diff) -> dict[str, Any]:
    """Output of `diff` as JSON values."""
    return {
        "is_equal": diff.is_equal,
        "only_first": list(diff.only[0]),
        "only_second": list(diff.only[1]),
        "tables": [_table_diff_json(table) for table in diff.tables],
        "dense": [_dense_diff_json(dense) for dense in diff.dense],
    }


def _table_diff_json(table: TableDiff) -> dict[str, Any]:
    return {
        "name": table.name,
        "is_equal": table.is_equal,
        "description": list(table.description),
        "num_rows": list(table.num_rows),
        "num_only": list(table.num_only),
        "only": [list(ids) for ids in table.only],
        "is_compared": table.is_compared,
        "columns": {
            name: {"num_different": each.num_different, "largest_difference": _finite(each.largest)}
            for name, each in table.columns.items()
        },
        "different": list(table.different),
    }


def _dense_diff_json(dense: DenseDiff) -> dict[str, Any]:
    return {
        "name": dense.name,
        "is_equal": dense.is_equal,
        "description": list(dense.description),
        "num_values": list(dense.num_values),
        "is_compared": dense.is_compared,
        "num_different_values": dense.values.num_different,
        "largest_value_difference": _finite(dense.values.largest),
        "num_different_states": dense.states.num_different,
        "largest_state_difference": _finite(dense.states.largest),
    }


def diff_table(diff: Diff) -> Table:
    """Output of `diff` for a terminal. Each cell has the count of the first snapshot above that of the second."""
    from fleet_sparse.core.columns import ROWS, STATES

    headings = ("name", "rows", "only here", "rows differ", "by", "states differ", "by", "verdict")
    grid = _grid("", *headings)
    for table in diff.tables:
        both = ["\n".join(f"{count:,}" for count in counts) for counts in (table.num_rows, table.num_only)]
        differences = _differences(table.columns.get(ROWS), table.columns.get(STATES))
        grid.add_row(table.name, *both, *differences, _verdict(table.is_equal))
    for dense in diff.dense:
        counts = "\n".join(f"{count:,}" for count in dense.num_values)
        differences = _differences(dense.values, dense.states) if dense.is_compared else _differences(None, None)
        grid.add_row(dense.name, counts, "", *differences, _verdict(dense.is_equal))
    return grid


def _differences(values: Differences | None, states: Differences | None) -> list[str]:
    if values is None or states is None:
        return ["not compared", "", "", ""]
    return [
        text
        for each in (values, states)
        for text in (f"{each.num_different:,}", f"{each.largest:.1e}" if each.largest else "")
    ]


def _verdict(is_equal: bool) -> str:
    return "equal" if is_equal else "DIFFERENT"


def diff_sentences(diff: Diff) -> list[str]:
    """Returns sentences about differences that the table does not show."""
    from fleet_sparse.core.columns import ROWS, STATES

    sentences = [
        f"{name}: only in the {which}"
        for names, which in zip(diff.only, ("first", "second"), strict=True)
        for name in names
    ]
    sentences += [f"{table.name}: {what}" for table in diff.tables for what in table.description]
    sentences += [f"{dense.name}: {what}" for dense in diff.dense for what in dense.description]
    for table in diff.tables:
        sentences += [
            f"{table.name}: column {name} differs in {each.num_different:,} rows"
            for name, each in table.columns.items()
            if each.num_different and name not in (ROWS, STATES)
        ]
        for ids, which in (
            (table.only[0], "only in the first:"),
            (table.only[1], "only in the second:"),
            (table.different, "different:"),
        ):
            if ids:
                sentences.append(f"{table.name}: {which} ids {', '.join(map(str, ids))}, possibly more")
    return sentences


# What was written


def written_json(path: str, manifest: Manifest) -> dict[str, Any]:
    """A snapshot that a command wrote, as JSON values."""
    return {
        "path": path,
        "snapshot": manifest.name,
        "num_shards": manifest.num_shards,
        "num_rows": manifest.num_rows,
        "num_bytes": sum(file.num_bytes for file in manifest.files),
    }


def written_text(path: str, manifest: Manifest) -> str:
    """A snapshot that a command wrote, for a terminal."""
    num_bytes = bytes_text(sum(file.num_bytes for file in manifest.files))
    shards = f"{manifest.num_shards} shard{'s' if manifest.num_shards > 1 else ''}"
    return f"{path}/{manifest.name}: {manifest.num_rows:,} rows, {shards}, {num_bytes}"


def shrunk_json(removals: Sequence[Removal], path: str | None, manifest: Manifest | None) -> dict[str, Any]:
    """Output of `shrink` as JSON values; `written` is null after a dry run."""
    return {
        "removed": removed_json(removals),
        "written": None if manifest is None or path is None else written_json(path, manifest),
    }


def removed_json(removals: Sequence[Removal]) -> list[dict[str, Any]]:
    """Removed rows as JSON values."""
    return [
        {"table": each.table, "why": each.criterion, "num_rows": each.num_removed, "examples": list(each.examples)}
        for each in removals
    ]


def shrunk_table(removals: Sequence[Removal]) -> Table:
    """Output of `shrink` for a terminal."""
    grid = _grid("rows that go", "table", "why", "rows", "for example", left=["why", "for example"])
    for each in removals:
        grid.add_row(each.table, each.criterion, f"{each.num_removed:,}", ", ".join(map(str, each.examples)))
    return grid


def exported_table(path: str, files: Sequence[ExportedFile]) -> Table:
    """Output of `export` for a terminal."""
    grid = _grid(path, "file", "kind", "name", "rows or values", left=["kind", "name"])
    for file in files:
        grid.add_row(file.file, file.kind, file.name, f"{file.num_rows:,}")
    return grid


def imported_json(path: str, imported: Imported) -> dict[str, Any]:
    """Output of `import-paddle` as JSON values."""
    return {
        **written_json(path, imported.manifest),
        "tables": [table._asdict() for table in imported.tables],
        "dense": [dense._asdict() for dense in imported.dense],
        "notes": list(imported.notes),
    }


def paddle_json(directories: Sequence[PaddleDirectory]) -> dict[str, Any]:
    """Output of `import-paddle` without tables as JSON values."""
    return {
        "directories": [
            {**each._asdict(), "fits": [{"paddle_rule": rule, "dim": dim} for rule, dim in each.fits]}
            for each in directories
        ]
    }


def paddle_table(directories: Sequence[PaddleDirectory]) -> Table:
    """Output of `import-paddle` without tables for a terminal."""
    grid = _grid("", "directory", "kind", "files", "matching rules", left=["kind", "matching rules"])
    for each in directories:
        fits = ", ".join(f"{rule} with dim {dim}" for rule, dim in each.fits)
        grid.add_row(each.name, each.kind, str(each.num_files), fits)
    return grid
