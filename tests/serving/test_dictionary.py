"""Dictionaries: written from snapshots, read by the reader of docs/dictionary.md, damaged."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from fleet_sparse import machine_memory
from fleet_sparse.core.initializer import constant, initial_rows, mean_of, truncated_normal, uniform
from fleet_sparse.errors import PlanError, SnapshotCorrupt, SnapshotError
from fleet_sparse.serving.dictionary import INDEX_FILE, export_dictionary, verify_dictionary, verify_file
from fleet_sparse.serving.exported_rows import RowChoice, check_choice, check_memory, quantised, stored_rows
from fleet_sparse.snapshot.reader import open_content
from support import saves, snapshots
from support.sources import ROOT

ADAGRAD, ADAM = saves.ADAGRAD.name, saves.ADAM.name


def page_reader():
    page = (ROOT / "docs" / "dictionary.md").read_text(encoding="utf-8")
    return re.search(r"```python\n(.*?)```", page, re.S)[1]


def dictionary_of(paths):
    """Opens files with the reader of the page."""
    scope = {}
    exec(page_reader(), scope)
    return scope["Dictionary"](paths)


def files(out, number, num_shards):
    return [out / f"{number}-{shard}-of-{num_shards}.fsd" for shard in range(num_shards)]


@pytest.fixture
def snapshot(tmp_path):
    """Returns a function that saves trained shards, and the directory of the snapshot."""

    def saved(num_shards=2, **changes):
        saves.save(saves.trained(num_shards, **changes), tmp_path / "rows")
        return str(tmp_path / "rows")

    return saved


def rows_of(where, table):
    with open_content(where) as content:
        blocks = list(content.rows(table))
    return np.concatenate([b.ids for b in blocks]), np.concatenate([b.rows for b in blocks])


@pytest.mark.parametrize("num_shards", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_the_pages_reader_finds_every_row(snapshot, tmp_path, num_shards, dtype):
    where = snapshot(num_shards)
    with open_content(where) as content:
        tables = export_dictionary(content, [ADAGRAD, ADAM], tmp_path / "out", RowChoice(dtype))
    for number, name in enumerate([ADAGRAD, ADAM]):
        ids, rows = rows_of(where, name)
        found = dictionary_of(files(tmp_path / "out", number, num_shards)).rows(ids)
        assert np.array_equal(found, quantised(rows, dtype).as_floats())
        assert tables[number].num_rows == len(ids)
        assert np.abs(found - rows).max() == pytest.approx(tables[number].max_error)
        assert (tables[number].max_error == 0) == (dtype == "float32")
    assert verify_dictionary(tmp_path / "out") == tables


def test_the_pages_reader_has_40_lines_and_needs_numpy_alone(snapshot, tmp_path):
    code = page_reader()
    assert len([line for line in code.splitlines() if line.strip()]) <= 40
    where = snapshot(1)
    with open_content(where) as content:
        export_dictionary(content, [ADAGRAD], tmp_path / "out", RowChoice())
    ids, rows = rows_of(where, ADAGRAD)
    np.savez(tmp_path / "rows.npz", ids=ids, rows=rows)
    script = f"{code}\nf, d = np.load('rows.npz'), Dictionary(['out/0-0-of-1.fsd'])\n"
    script += "assert np.array_equal(d.rows(f['ids']), f['rows'])"
    check = "\nimport sys; assert 'fleet_sparse' not in sys.modules and 'paddle' not in sys.modules"
    ended = subprocess.run([sys.executable, "-c", script + check], cwd=tmp_path, capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(("unseen", "value"), [("mean", 0.5), ("zeros", 0.0)])
@pytest.mark.parametrize("initializer", [constant(0.5), uniform(0.0, 1.0)])
def test_an_id_without_a_row_reads_the_unseen_row(tmp_path, initializer, unseen, value):
    spec = replace(snapshots.SGD, initializer=initializer)
    row = np.array([2.0, 3.0], np.float32)
    model = snapshots.Model((snapshots.TableModel(spec, {8: (row.tobytes(), b"", 0)}),))
    snapshots.save(tmp_path / "rows", model)
    with open_content(str(tmp_path / "rows")) as content:
        export_dictionary(content, [spec.name], tmp_path / "out", RowChoice(unseen=unseen))
    found = dictionary_of(files(tmp_path / "out", 0, 1)).rows([8, 0, -1, 2**63 - 1, -(2**63)])
    assert found.tolist() == [[2.0, 3.0]] + [[value, value]] * 4


def test_a_table_without_rows_is_exported(snapshot, tmp_path):
    with open_content(snapshot(2)) as content:
        export_dictionary(content, [saves.EMPTY.name], tmp_path / "out", RowChoice())
    found = dictionary_of(files(tmp_path / "out", 0, 2)).rows([1, 2])
    assert found.tolist() == [[0.0] * 3] * 2
    assert verify_dictionary(tmp_path / "out")[0].num_rows == 0


def test_every_changed_byte_of_a_file_is_found(snapshot, tmp_path):
    with open_content(snapshot(1, num_ids=5)) as content:
        export_dictionary(content, [ADAGRAD], tmp_path / "out", RowChoice("int8"))
    (path,) = files(tmp_path / "out", 0, 1)
    intact = path.read_bytes()
    for offset in range(len(intact)):
        changed = bytearray(intact)
        changed[offset] ^= 0x10
        path.write_bytes(changed)
        with pytest.raises((SnapshotCorrupt, SnapshotError)):
            verify_file(path)
    path.write_bytes(intact[:-1])
    with pytest.raises(SnapshotCorrupt):
        verify_file(path)


def test_an_export_without_its_index_is_refused(tmp_path):
    with pytest.raises(SnapshotError, match=r"DICTIONARY.json"):
        verify_dictionary(tmp_path)


def test_a_file_of_another_snapshot_is_found(snapshot, tmp_path):
    for name, num_ids in (("one", 5), ("other", 6)):
        saves.save(saves.trained(1, num_ids=num_ids), tmp_path / name / "rows")
        with open_content(str(tmp_path / name / "rows")) as content:
            export_dictionary(content, [ADAGRAD], tmp_path / name, RowChoice())
    index = (tmp_path / "one" / INDEX_FILE).read_text()
    (tmp_path / "other" / INDEX_FILE).write_text(index)
    with pytest.raises(SnapshotCorrupt):
        verify_dictionary(tmp_path / "other")


def test_every_changed_byte_of_the_index_is_found(snapshot, tmp_path):
    with open_content(snapshot(1, num_ids=5)) as content:
        export_dictionary(content, [ADAGRAD], tmp_path / "out", RowChoice())
    path = tmp_path / "out" / INDEX_FILE
    intact = path.read_bytes()
    for offset in range(len(intact.rstrip())):
        path.write_bytes(intact[:offset] + bytes([intact[offset] ^ 0x10]) + intact[offset + 1 :])
        with pytest.raises(SnapshotCorrupt):
            verify_dictionary(tmp_path / "out")
    for damaged in (b"", b"[]", b"{}", b"\xff", intact[:-3]):
        path.write_bytes(damaged)
        with pytest.raises(SnapshotCorrupt):
            verify_dictionary(tmp_path / "out")


def test_a_second_export_removes_the_files_of_the_first(snapshot, tmp_path):
    out = tmp_path / "out"
    for num_shards, tables in ((3, [ADAGRAD, ADAM]), (2, [ADAM])):
        saves.save(saves.trained(num_shards), tmp_path / str(num_shards))
        with open_content(str(tmp_path / str(num_shards))) as content:
            export_dictionary(content, tables, out, RowChoice())
        (out / "of_the_user.txt").touch()
    names = {path.name for path in files(out, 0, 2)}
    assert {path.name for path in out.iterdir()} == {INDEX_FILE, "of_the_user.txt", *names}
    verify_dictionary(out)


@pytest.mark.parametrize(
    ("dtype", "value"), [("float16", 70000.0), ("float16", np.nan), ("int8", np.nan), ("int8", np.inf)]
)
def test_a_row_that_a_type_cannot_store_is_refused(dtype, value):
    rows = np.ones((3, 4), np.float32)
    rows[1, 2] = value
    with pytest.raises(PlanError, match="table 'emb': the row of id 8 "):
        stored_rows("emb", np.array([7, 8, 9]), rows, dtype)
    with pytest.raises(PlanError, match="table 'emb': the row of unseen ids "):
        stored_rows("emb", np.array([7]), rows, dtype)


def test_the_smallest_float32_rows_are_stored_as_int8():
    rows = np.array([[1e-45, 0.0], [-1e-44, 1e-45]], np.float32)
    stored = stored_rows("emb", np.array([7, 8]), rows, "int8")
    assert np.abs(stored.as_floats() - rows).max() < 1e-40


@pytest.mark.parametrize(
    ("choice", "text"), [(RowChoice(seen_within_days=1), "seen-within-days 1"), (RowChoice(min_count=2), "min-count 2")]
)
def test_a_choice_needs_what_it_selects_by(snapshot, choice, text):
    with open_content(snapshot(1)) as content, pytest.raises(PlanError, match=f"table 'adagrad': --{text}"):
        check_choice(content, [ADAGRAD], choice)


def test_an_export_of_half_of_the_available_memory_is_forced(snapshot, monkeypatch):
    with open_content(snapshot(1)) as content:
        monkeypatch.setattr(machine_memory, "available_bytes", lambda: 1 << 10)
        with pytest.raises(PlanError, match="--force"):
            check_memory(content, [ADAGRAD], RowChoice(), is_forced=False)
        check_memory(content, [ADAGRAD], RowChoice(), is_forced=True)


@pytest.mark.parametrize(("low", "high"), [(-1.0, 3.0), (2.0, 2.5), (-9.0, -1.0)])
def test_the_mean_of_a_truncated_normal_is_that_of_its_rows(low, high):
    initializer = truncated_normal(0.5, 1.0, low, high)
    drawn = initial_rows(initializer, np.arange(10_000), dim=4, seed=1, salt=2)
    assert mean_of(initializer) == pytest.approx(drawn.mean(), abs=0.02)
