"""Specs out of the JSON that `to_json` wrote: it travels in a registration and lies in snapshots."""

from __future__ import annotations

import msgspec

from .dense_spec import DenseSpec, Segment
from .entries import Entry
from .initializer import Initializer
from .table_spec import TableSpec


class _TableFields(msgspec.Struct, tag_field="kind", tag=TableSpec.kind, forbid_unknown_fields=True):
    """Names and types of a table's JSON. `TableSpec` checks the values, in messages that name the table."""

    name: str
    dim: int
    rule: str
    hyperparameters: dict[str, float]
    initializer: Initializer
    seed: int = 0
    dtype: str = "float32"
    max_ids: int | None = None
    entry: Entry | None = None
    counts_for: str | None = None
    has_show_click: bool = False


class _DenseFields(msgspec.Struct, tag_field="kind", tag=DenseSpec.kind, forbid_unknown_fields=True):
    """Names and types of the JSON of dense parameters. `DenseSpec` checks the values."""

    name: str
    rule: str
    hyperparameters: dict[str, float]
    segments: tuple[Segment, ...]


_SPEC_OF: dict[type, type[TableSpec] | type[DenseSpec]] = {_TableFields: TableSpec, _DenseFields: DenseSpec}
_decoder = msgspec.json.Decoder(_TableFields | _DenseFields)


def parse_spec(text: str) -> TableSpec | DenseSpec:
    """Returns the spec that `to_json` wrote.

    Raises:
        ValueError: The text is not JSON, has an unknown field, lacks one, or has a value that the spec refuses.
    """
    try:
        read = _decoder.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(f"table spec: is not the JSON of a table or of dense parameters ({error})") from None
    fields = msgspec.structs.asdict(read)
    return _SPEC_OF[type(read)](**fields | {"hyperparameters": tuple(fields["hyperparameters"].items())})
