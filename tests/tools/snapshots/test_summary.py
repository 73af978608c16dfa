from __future__ import annotations

from pathlib import Path

import numpy as np

from fleet_sparse.core.initializer import constant
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.snapshot.manifest import DELTA
from fleet_sparse.snapshot.reader import open_content
from fleet_sparse.tools.snapshots.summary import first_rows, rows_of_ids, summary_of
from support.snapshots import ADAM, SGD, Model, TableModel, in_order, random_model, random_row, save


def test_a_full_snapshot_says_how_many_rows_each_table_has(tmp_path: Path) -> None:
    model = random_model(1, 500)
    save(tmp_path, model, 3)
    with open_content(str(tmp_path)) as content:
        summary = summary_of(content)
        assert content.num_bytes_read < 10_000 < content.num_bytes, "no block"
        assert [(table.spec, table.num_rows) for table in summary.tables] == [(ADAM, 500), (SGD, 500)]
        assert [file.shard for file in summary.shards] == [0, 1, 2]
        assert summary.workers == model.workers
        assert sum(link.num_bytes for link in summary.chain) == content.num_bytes


def test_bytes_of_a_table_are_those_of_its_blocks_and_entries(tmp_path: Path) -> None:
    save(tmp_path, random_model(1, 500), 2)
    with open_content(str(tmp_path)) as content:
        adam, _ = summary_of(content).tables
    assert adam.num_bytes == 500 * (8 + 3 * 4 * 3) + 2 * 48, "one block in each file"


def test_of_a_chain_only_the_rows_in_its_files_are_known(tmp_path: Path) -> None:
    save(tmp_path, random_model(1, 500), 2)
    save(tmp_path, random_model(2, 30), 3, kind=DELTA, removed={SGD.name: [1, 2]})
    with open_content(str(tmp_path)) as content:
        summary = summary_of(content)
    assert [table.num_rows for table in summary.tables] == [None, None]
    assert [table.num_stored_rows for table in summary.tables] == [530, 530]
    assert [table.num_removed for table in summary.tables] == [0, 2]
    assert [link.snapshot for link in summary.chain] == ["000001-full", "000002-delta"]


def test_first_rows_are_the_first_in_the_order_of_their_hash(tmp_path: Path) -> None:
    model = random_model(1, 500)
    save(tmp_path, model, 3)
    expected = in_order(model.tables[0].rows, ADAM)
    with open_content(str(tmp_path)) as content:
        for count in (1, 200, 499, 600):
            found = first_rows(content, ADAM.name, count)
            assert np.concatenate([rows.ids for rows in found]).tolist() == expected[:count].tolist()


def test_rows_of_ids_are_found_with_one_block_read_for_each(tmp_path: Path) -> None:
    wide = TableSpec(name="wide", dim=64, rule="sgd", initializer=constant(0.0))
    row = random_row(np.random.default_rng(1), wide)
    save(tmp_path, Model((TableModel(wide, dict.fromkeys(range(30_000), row)),)), 2)
    with open_content(str(tmp_path)) as content:
        before = content.num_bytes_read
        found = rows_of_ids(content, "wide", [7, 20_000, -1])
        assert content.num_bytes_read - before <= 3 << 20 < content.num_bytes // 2
    rows = {one: row.tobytes() for block in found for one, row in zip(block.ids.tolist(), block.rows, strict=True)}
    assert rows == {7: row[0], 20_000: row[0]}
