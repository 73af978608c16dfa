"""The worked example of docs/snapshot.md: what is in it, written by the code."""

from __future__ import annotations

import msgspec
import numpy as np

from fleet_sparse.core.dense_spec import DenseSpec, Segment
from fleet_sparse.core.initializer import constant
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.core.watermark import Watermark
from fleet_sparse.snapshot.manifest import Manifest, ShardFile, WorkerPosition
from fleet_sparse.snapshot.rows import Rows
from fleet_sparse.snapshot.rows_writer import RowsWriter

from .rows_files import BytesOutput

SAVE_ID = "4f0e7c2a9b3d4c58a1e6d27f80b19c34"
TABLE = TableSpec(name="C1", dim=2, rule="adagrad", initializer=constant(0.0))
DENSE = DenseSpec("dense", "adagrad", (), (Segment("w", 0, 3, 1.0),))
ROWS = Rows.of(
    np.array([7, -1]),
    np.array([[0.5, -0.25], [1, 2]], np.float32),
    np.array([[[0.0625, 4]], [[1, 0.5]]], np.float32),
)
VALUES = np.array([1, -1, 0.5], np.float32)
STATES = np.array([[0.25, 0.5, 0.75]], np.float32)


def example_file() -> tuple[bytes, ShardFile]:
    """The bytes of the rows file, and how the manifest names it."""
    file = BytesOutput()
    writer = RowsWriter(
        file,
        shard=0,
        num_shards=1,
        cluster_id=0xC0FFEE,
        incarnation=0x0102030405060708,
        placement_version=1,
        save_id=SAVE_ID,
    )
    writer.begin_table(TABLE, optimizer_step=9, num_days=0)
    writer.write_rows(ROWS)
    writer.end_table()
    writer.write_dense(DENSE, optimizer_step=9, begin=0, end=3, assigned=True, values=VALUES, states=STATES)
    written = writer.finish()
    client = Watermark(bytes(range(0xA0, 0xB0)), 1, 9)
    return bytes(file.content), msgspec.structs.replace(written, clients=(client,))


def example_manifest() -> Manifest:
    """The manifest in the same directory."""
    _, file = example_file()
    return Manifest(
        number=1,
        kind="full",
        base=None,
        save_id=SAVE_ID,
        saved_at="2026-03-01T10:15:00+00:00",
        tables=("C1",),
        is_complete=True,
        files=(file,),
        workers=(WorkerPosition(0, 9, {"epoch": 0, "batch": 9}),),
    )
