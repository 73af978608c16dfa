"""`fleet-sparse export`: a served model as a plain Paddle model, an ONNX model, or a dictionary of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleet_sparse.errors import InstallError

from .custom_rules import add_custom_rules
from .terminal import AS_IS, bar, console

if TYPE_CHECKING:
    from fleet_sparse.serving.exported_rows import RowChoice, RowError


class ExportFormat(StrEnum):
    """The kind of files that `export` writes."""

    paddle = "paddle"
    onnx = "onnx"
    dictionary = "dictionary"


class RowDtype(StrEnum):
    """Type of exported rows."""

    float32 = "float32"
    float16 = "float16"
    int8 = "int8"


class Unseen(StrEnum):
    """The row of an id without one."""

    mean = "mean"
    zeros = "zeros"


def export(  # noqa: PLR0913, PLR0917  # the options of the command
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Directory of fleet.save_inference_model; a path or URL.")
    ] = None,
    out: Annotated[Path | None, typer.Argument(metavar="OUT", help="Directory; created if missing.")] = None,
    to: Annotated[ExportFormat, typer.Option("--format", help="What to write.")] = ExportFormat.paddle,
    snapshot: Annotated[
        str | None, typer.Option(metavar="DIR", help="Rows and dense values. Default: the newest in MODEL/rows.")
    ] = None,
    table: Annotated[
        list[str] | None, typer.Option(help="dictionary: only this table; may be repeated. Default: all.")
    ] = None,
    dtype: Annotated[RowDtype, typer.Option(help="Type of the rows.")] = RowDtype.float32,
    unseen: Annotated[Unseen, typer.Option(help="Row of an id without one.")] = Unseen.mean,
    seen_within_days: Annotated[
        int | None, typer.Option(min=0, metavar="D", help="Only rows that were pushed in the last D ended days.")
    ] = None,
    min_count: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Only rows that were pushed N times or more.")
    ] = None,
    force: Annotated[bool, typer.Option(help="Take more than half of the available memory.")] = False,
    verify: Annotated[
        Path | None, typer.Option(metavar="OUT", help="Check every byte of a dictionary, in place of exporting.")
    ] = None,
) -> None:
    """Writes a model that `fleet.save_inference_model` saved for other programs, without script and pservers.

    *paddle*: one plain Paddle model, ids in, predictions out. *onnx*: one ONNX model. *dictionary*: rows by id, in
    files that any program can map. Models are checked before they are written.
    """
    if verify is not None:
        _verify(verify)
        return
    if model is None or out is None:
        raise typer.BadParameter("name the model and the directory of the export.", param_hint="MODEL OUT")
    if table and to is not ExportFormat.dictionary:
        raise typer.BadParameter(f"is for dictionaries; --format {to} has the whole model.", param_hint="--table")
    from fleet_sparse.serving.exported_rows import RowChoice

    add_custom_rules()
    choice = RowChoice(dtype.value, unseen.value, seen_within_days, min_count)
    if to is ExportFormat.dictionary:
        _export_dictionary(model, out, choice, snapshot, table or (), is_forced=force)
    else:
        _export_model(model, out, choice, snapshot, to, is_forced=force)


def _verify(out: Path) -> None:
    from fleet_sparse.serving.dictionary import verify_dictionary

    for each in verify_dictionary(out):
        console.print(f"{out}: table {each.name!r} is intact: {each.num_rows} rows, {each.dtype}", **AS_IS)


def _export_dictionary(
    model: str, out: Path, choice: RowChoice, snapshot: str | None, tables: Sequence[str], *, is_forced: bool
) -> None:
    from fleet_sparse.serving.dictionary import export_dictionary
    from fleet_sparse.serving.exported_rows import check_choice, check_memory, user_tables
    from fleet_sparse.serving.model import read_model
    from fleet_sparse.snapshot.directory import directory_at
    from fleet_sparse.snapshot.reader import open_content

    directory = directory_at(model)
    where = snapshot or str(directory.child(read_model(directory).rows))
    with bar("reading") as progress, open_content(where, progress) as content:
        progress.expect(content.num_bytes)
        names = list(tables) or user_tables(content)
        check_choice(content, names, choice)
        check_memory(content, names, choice, is_forced=is_forced)
        exported = export_dictionary(content, names, out, choice)
        name = content.manifest.name
    for each in exported:
        errors = f", largest error {each.max_error:.3g}, RMS {each.rms_error:.3g}"
        console.print(
            f"table {each.name!r}: {each.num_rows} rows, {each.dtype}{errors if each.dtype != 'float32' else ''}",
            **AS_IS,
        )
    console.print(f"wrote {out}, of {name}", **AS_IS)


def _export_model(
    model: str, out: Path, choice: RowChoice, snapshot: str | None, to: ExportFormat, *, is_forced: bool
) -> None:
    from fleet_sparse.serving.exported_rows import check_choice, check_memory
    from fleet_sparse.serving.model import read_model
    from fleet_sparse.snapshot.directory import directory_at
    from fleet_sparse.snapshot.reader import open_content

    directory = directory_at(model)
    served = read_model(directory)
    with (
        bar("reading") as progress,
        open_content(snapshot or str(directory.child(served.rows)), progress) as content,
    ):
        progress.expect(content.num_bytes)
        names = [each.name for each in served.tables]
        check_choice(content, names, choice)
        check_memory(content, names, choice, is_forced=is_forced)
        try:
            if to is ExportFormat.onnx:
                from fleet_sparse.serving.onnx_export import export_onnx as write
            else:
                from fleet_sparse.serving.paddle_export import export_paddle as write
            errors = write(directory, served, content, out, choice)
        except ModuleNotFoundError as error:
            extra = "cpu" if error.name == "paddle" else "onnx"
            raise InstallError(
                f"export --format {to}: {error.name} is not installed; pip install 'fleet-sparse[{extra}]'"
            ) from None
        _print_errors(errors, choice)
        console.print(f"wrote {out}, of {content.manifest.name}", **AS_IS)


def _print_errors(errors: Mapping[str, RowError], choice: RowChoice) -> None:
    for name, error in errors.items():
        text = f", largest error {error.max_error:.3g}, RMS {error.rms_error:.3g}" if choice.dtype != "float32" else ""
        console.print(f"table {name!r}: {error.num_rows} rows, {choice.dtype}{text}", **AS_IS)
