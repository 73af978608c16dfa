"""SERVING.json: what a served model consists of. `docs/serving.md` defines every field."""

from __future__ import annotations

import json
from typing import Annotated, Any

import msgspec
import xxhash

from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import SnapshotError
from fleet_sparse.snapshot.checked_json import decode_checked, encode_checked
from fleet_sparse.snapshot.checksum import Checksum
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
        """Returns the description of a file with this content."""
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
        """Returns the description of a table."""
        return cls(spec.name, Checksum(spec.schema_hash), json.loads(spec.to_json()))


class ModelLookup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A lookup."""

    table: str
    dim: Count
    feed: str | None
    """Name of the input that is the ids; None if they are computed."""
    shape: tuple[int, ...]
    """Shape of the ids."""
    dtype: str
    """Dtype of the ids."""
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


class Lengths(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Inputs of a field of variable length."""

    feed: str
    """Name of the input with the number of ids of each example."""
    of: str
    """Name of the input with the ids, or with their weights."""


class Finding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of the self-check of one network in one configuration."""

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
    ragged: tuple[str, ...] = ()
    """Names of the feeds whose first dimension is the number of ids, not that of examples."""
    lengths: tuple[Lengths, ...] = ()
    """Which inputs have to agree; none for lengths that are computed."""
    rows: str = ROWS
    version: int = VERSION
    format: str = FORMAT

    def to_json(self) -> bytes:
        """Returns the bytes of `SERVING.json`."""
        return encode_checked(self)

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
    if NAME not in directory.names():
        raise SnapshotError(
            f"{directory}: it has no {NAME}, so no model was saved there, or its save did not finish. Save it with "
            "fleet.save_inference_model"
        )
    return decode_checked(read(directory, NAME, MAX_BYTES), ServedModel, f"{directory}/{NAME}")


def series_of(directory: Directory) -> Directory:
    """Returns the directory of the snapshots of a model: its `rows`, or the directory itself if no model is there.

    Raises:
        SnapshotError, SnapshotCorrupt: As `read_model`.
    """
    return directory.child(read_model(directory).rows) if NAME in directory.names() else directory


def read_network_file(directory: Directory, model: ServedModel, name: str) -> bytes:
    """Reads a file of the networks of a model.

    Args:
        directory: Directory of the model.
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
