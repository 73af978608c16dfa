"""SERVING.json: what a served model consists of. `docs/serving.md` defines every field."""

from __future__ import annotations

import json
from typing import Annotated, Any

import msgspec
import xxhash

from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import SnapshotError
from fleet_sparse.snapshot.checksum import Checksum, decode_checksum, encode_checksum
from fleet_sparse.snapshot.directory import Directory, corrupt, read

NAME = "SERVING.json"
FORMAT = "fleet_sparse serving model"
VERSION = 1
NETWORKS, ROWS = "networks", "rows"
FORWARD, NETWORK, IDS = "forward", "network", "ids"
EXAMPLES = "check.npz"
MAX_BYTES = 64 << 20
MAX_NETWORK_BYTES = 1 << 36

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of the networks."""

    name: str
    num_bytes: Count
    checksum: Checksum

    @classmethod
    def of(cls, name: str, content: bytes) -> File:
        """The description of a file with this content."""
        return cls(name, len(content), Checksum(xxhash.xxh3_64_intdigest(content)))


class Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An input or a result."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """-1 for any size."""


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table that lookups read."""

    name: str
    schema_hash: Checksum
    spec: dict[str, Any]

    @classmethod
    def of(cls, spec: TableSpec) -> Table:
        """The description of a table."""
        return cls(spec.name, Checksum(spec.schema_hash), json.loads(spec.to_json()))


class ModelLookup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A lookup."""

    table: str
    dim: Count
    feed: str | None
    """Name of the input that is the ids; None if they are computed."""
    shape: tuple[int, ...]
    """Of the ids."""
    dtype: str
    """Of the ids."""
    padding_idx: int | None
    size: int | None
    """Ids lie in `[0, size)`; None if all are allowed."""


class DenseParameter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A parameter in a dense array."""

    name: str
    offset: Count
    shape: tuple[int, ...]


class DenseArray(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A dense array of the snapshots."""

    array: str
    parameters: tuple[DenseParameter, ...]


class Finding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the self-check of one network in one configuration found."""

    network: str
    configuration: str
    difference: float


class ServedModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model that `fleet.save_inference_model` saved."""

    number: Count
    saved_at: str
    fleet_sparse: str
    paddle: str
    networks: str
    """Name of the directory with the files."""
    files: tuple[File, ...]
    feeds: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    tables: tuple[Table, ...]
    lookups: tuple[ModelLookup, ...]
    dense: tuple[DenseArray, ...]
    is_split: bool
    check: tuple[Finding, ...]
    rows: str = ROWS
    version: int = VERSION
    format: str = FORMAT

    def to_json(self) -> bytes:
        """The bytes of `SERVING.json`."""
        values = json.loads(msgspec.json.encode(self, enc_hook=encode_checksum))
        return json.dumps({**values, "checksum": str(_checksum(values))}, indent=1, sort_keys=True).encode() + b"\n"

    @property
    def computed(self) -> tuple[int, ...]:
        """Numbers of the lookups whose ids are computed in the program."""
        return tuple(number for number, lookup in enumerate(self.lookups) if lookup.feed is None)


def read_model(directory: Directory) -> ServedModel:
    """Reads and checks `SERVING.json`.

    Raises:
        SnapshotError: It is missing, or of another version.
        SnapshotCorrupt: It is damaged.
    """
    where = f"{directory}/{NAME}"
    if NAME not in directory.names():
        raise SnapshotError(
            f"{directory}: it has no {NAME}, so no model was saved there, or its save did not finish. Save it with "
            "fleet.save_inference_model"
        )
    content = read(directory, NAME, MAX_BYTES)
    try:
        values = json.loads(content)
        checksum = values.pop("checksum")
    except (ValueError, KeyError, AttributeError) as error:
        raise corrupt(where, f"it is not JSON with a checksum ({error})", 0) from error
    if checksum != str(_checksum(values)):
        raise corrupt(where, f"its checksum is {checksum}, should be {_checksum(values)}", 0)
    if values.get("format") != FORMAT:
        raise corrupt(where, f"its format is {values.get('format')!r}, should be {FORMAT!r}", 0)
    if values.get("version") != VERSION:
        raise SnapshotError(f"{where}: its version is {values.get('version')}, this build reads {VERSION}")
    try:
        return msgspec.convert(values, ServedModel, dec_hook=decode_checksum)
    except msgspec.ValidationError as error:
        raise corrupt(where, str(error), 0) from error


def read_network_file(directory: Directory, model: ServedModel, name: str) -> bytes:
    """Reads a file of the networks of a model.

    Args:
        directory: That of the model.
        model: The model.
        name: Name of the file.

    Raises:
        SnapshotError: It is missing.
        SnapshotCorrupt: It is not the file that the model names.
    """
    networks = directory.child(NETWORKS).child(model.networks)
    file = next((each for each in model.files if each.name == name), None)
    if file is None:
        raise SnapshotError(
            f"{networks}: the model has no {name}; it has {', '.join(each.name for each in model.files)}"
        )
    content = read(networks, name, MAX_NETWORK_BYTES)
    if (found := File.of(name, content)) != file:
        raise corrupt(
            f"{networks}/{name}",
            f"it has {found.num_bytes} bytes with checksum {found.checksum}, should have {file.num_bytes} with "
            f"{file.checksum}",
            0,
        )
    return content


def _checksum(values: dict[str, Any]) -> Checksum:
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return Checksum(xxhash.xxh3_64_intdigest(text.encode()))
