"""`fleet-sparse snapshot`: arguments, output and exit codes; what it does is in tests/tools/snapshots."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys

import fsspec
import numpy as np
import pytest
from typer.testing import CliRunner

from fleet_sparse import cli
from fleet_sparse.cli import terminal
from fleet_sparse.core.dense_spec import DenseSpec, Segment
from fleet_sparse.core.initializer import constant
from fleet_sparse.core.rules import RULES
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.core.watermark import Watermark
from fleet_sparse.errors import FleetSparseError, SettingError, SnapshotError
from fleet_sparse.snapshot.manifest import DELTA
from fleet_sparse.snapshot.reader import open_content
from support.admissions import CountedJob, count_filter
from support.jobs import environment
from support.saves import save as save_shards
from support.snapshots import (
    ADAM,
    SGD,
    Model,
    TableModel,
    assert_same,
    random_dense,
    random_model,
    save,
    saved_model,
)

ZERO = constant(0.0)
MARK = Watermark(bytes(range(16)), 1, 1200)


@pytest.fixture(autouse=True)
def wide_console(monkeypatch):
    monkeypatch.setattr(terminal.console, "width", 160)


def snapshot(*arguments, fails=0):
    """Runs a command; raises what it raises, and its output otherwise."""
    result = CliRunner().invoke(cli.app, ["snapshot", *map(str, arguments)])
    if isinstance(result.exception, FleetSparseError):
        raise result.exception
    assert result.exit_code == fails, result.output
    return result.output


def in_json(*arguments, fails=0):
    return json.loads(snapshot(*arguments, "--json", fails=fails))


@pytest.fixture
def model(tmp_path):
    """The series `model`: a full snapshot of two shards."""
    model = random_model(1, 50, days=1)
    save(tmp_path / "model", model, 2, clients=[(MARK,), ()])
    return model


@pytest.fixture
def chain(tmp_path, model):
    """The same with a delta."""
    save(tmp_path / "model", random_model(2, 10, days=2), 3, kind=DELTA, removed={SGD.name: [1, 2]})
    return tmp_path / "model"


# inspect


def test_inspect_shows_all_that_a_snapshot_is(tmp_path, model) -> None:
    output = snapshot("inspect", tmp_path / "model")
    for text in (
        "000001-full │ 2026-03-01T10:15:00+00:00 │      2 │  100",
        "a/b@1 │   3 │ adam │   50 │            6",
        "dense │ adam │     11 │          2 │      2 │   11",
        "00010203 epoch 1 │  1,200",
        '0      │   12 │ {"epoch": 1}',
    ):
        assert text in output


def test_inspect_in_json_has_all_its_keys(tmp_path, model) -> None:
    found = in_json("inspect", tmp_path / "model")
    assert [*found] == ["path", "snapshot", "is_whole", "num_bytes", "chain", "tables", "dense", "shards", "workers"]
    assert {name: [*found[name][0]] for name in ("chain", "tables", "dense", "shards", "workers")} == {
        "chain": ["snapshot", "saved_at", "save_id", "num_shards", "num_rows", "num_removed", "num_bytes"],
        "tables": [
            *("name", "dim", "rule", "num_states", "optimizer_step", "days", "columns"),
            *("num_rows", "num_stored_rows", "num_removed", "num_bytes", "bytes_per_row", "spec"),
        ],
        "dense": ["name", "rule", "num_values", "num_states", "optimizer_step", "assigned", "spec"],
        "shards": ["shard", "file", "num_bytes", "num_rows", "num_removed", "checksum", "clients"],
        "workers": ["worker", "step", "position"],
    }
    assert found["tables"][0]["spec"] == json.loads(ADAM.to_json())
    assert found["shards"][0]["clients"] == [{"client_id": MARK.client_id.hex(), "epoch": 1, "watermark": 1200}]


def test_inspect_of_a_chain_says_what_the_rows_are_at_most(chain) -> None:
    assert "up to 60" in snapshot("inspect", chain)
    found = in_json("inspect", chain)
    assert [table["num_rows"] for table in found["tables"]] == [None, None]
    assert [link["snapshot"] for link in found["chain"]] == ["000001-full", "000002-delta"]


def test_inspect_of_a_file_names_it(tmp_path) -> None:
    (tmp_path / "rows.fss").touch()
    with pytest.raises(SnapshotError, match=r"rows\.fss"):
        snapshot("inspect", tmp_path / "rows.fss")


def test_inspect_shows_rows(tmp_path, model) -> None:
    rows = in_json("inspect", tmp_path / "model", "--table", "sgd", "--rows", "3")["rows"]
    assert len(rows) == 3
    for row in rows:
        expected, _, day = model.tables[1].rows[row["id"]]
        floats = np.frombuffer(expected, np.float32).tolist()
        assert row["row"] == [value if np.isfinite(value) else None for value in floats]
        assert (row["table"], row["states"], row["last_update_day"]) == ("sgd", [], day)
    assert f"│ {rows[0]['id']}" in snapshot("inspect", tmp_path / "model", "--table", "sgd", "--rows", "3")


def test_inspect_shows_the_rows_of_ids_and_missing_ids(tmp_path, model) -> None:
    one = next(one for one in model.tables[0].rows if one < 0)
    found = in_json("inspect", tmp_path / "model", "--table", ADAM.name, "--id", one, "--id", "5")
    assert [row["id"] for row in found["rows"]] == [one]
    assert found["missing"] == [{"table": ADAM.name, "id": 5}]
    output = snapshot("inspect", tmp_path / "model", "--id", one)
    assert f"sgd: no row with id {one}" in output
    assert f"a/b@1: no row with id {one}" not in output


# verify


def test_verify_says_that_all_is_good(chain) -> None:
    assert snapshot("verify", chain).count("good") == 2 + 2 + 3
    found = in_json("verify", chain)
    assert found["is_good"]
    assert found["num_bytes"] == sum(path.stat().st_size for path in chain.rglob("*.fss"))
    assert [each["snapshot"] for each in found["snapshots"]] == ["000001-full", "000002-delta"]


def test_verify_names_the_file_and_the_byte(chain) -> None:
    path = chain / "000001-full" / "shard-1-of-2.fss"
    content = bytearray(path.read_bytes())
    content[70] ^= 1
    path.write_bytes(content)
    output = snapshot("verify", chain, fails=1)
    assert output.count("BAD") == 1
    assert f"{path}: checksum mismatch in" in output
    found = in_json("verify", chain, fails=1)
    assert not found["is_good"]
    full, delta = found["snapshots"]
    assert (full["is_good"], full["error"], delta["is_good"]) == (False, None, True)
    (bad,) = [file for file in full["files"] if file["error"]]
    assert (bad["path"], bad["offset"]) == (str(path), 64)
    assert bad["error"].endswith("at byte 64")


# diff


def test_diff_of_equal_snapshots_is_0(tmp_path, model) -> None:
    save(tmp_path / "other", model, 3)
    assert snapshot("diff", tmp_path / "model", tmp_path / "other").count("equal") == 3
    assert in_json("diff", tmp_path / "model", tmp_path / "other")["is_equal"]


def test_diff_of_others_is_1_and_says_what_differs(tmp_path) -> None:
    for name, values in (("one", {1: [0, 0], 2: [0, 0]}), ("other", {1: [0, 2], 3: [0, 0]})):
        rows = {key: (np.array(row, np.float32).tobytes(), b"", 0) for key, row in values.items()}
        save(tmp_path / name, Model((TableModel(SGD, rows),)))
    output = snapshot("diff", tmp_path / "one", tmp_path / "other", fails=1)
    assert "DIFFERENT" in output
    assert "sgd: only in the first: ids 2" in output
    found = in_json("diff", tmp_path / "one", tmp_path / "other", fails=1)
    assert [*found] == ["is_equal", "only_first", "only_second", "tables", "dense"]
    (table,) = found["tables"]
    assert table["columns"]["rows"] == {"num_different": 1, "largest_difference": 2.0}
    assert (table["num_only"], table["only"], table["different"]) == ([1, 1], [[2], [3]], [1])
    assert [*table] == (
        ["name", "is_equal", "description", "num_rows", "num_only", "only", "is_compared", "columns", "different"]
    )


def test_diff_with_a_tolerance_and_of_nan(tmp_path) -> None:
    for name, value in (("one", 1.0), ("other", 1.5), ("nan", np.nan)):
        rows = {7: (np.array([value, 0], np.float32).tobytes(), b"", 0)}
        save(tmp_path / name, Model((TableModel(SGD, rows),)))
    snapshot("diff", tmp_path / "one", tmp_path / "other", "--tolerance", "0.5")
    snapshot("diff", tmp_path / "one", tmp_path / "other", "--tolerance", "0.25", fails=1)
    found = in_json("diff", tmp_path / "one", tmp_path / "nan", fails=1)
    assert found["tables"][0]["columns"]["rows"]["largest_difference"] is None


# On a terminal


def test_a_bar_on_a_terminal_goes_to_standard_error(chain) -> None:
    result = CliRunner().invoke(cli.app, ["snapshot", "verify", str(chain), "--json"], env={"FORCE_COLOR": "1"})
    assert "reading" in result.stderr
    assert json.loads(result.stdout)["is_good"]


def test_there_is_no_bar_where_there_is_no_terminal(chain) -> None:
    result = CliRunner().invoke(cli.app, ["snapshot", "verify", str(chain)], env={"NO_COLOR": "1"})
    assert (result.exit_code, result.stderr) == (0, "")


# reshard, export, import


def test_reshard_writes_the_same_content_and_reports_it(chain, tmp_path) -> None:
    found = in_json("reshard", chain, tmp_path / "other", "--shards", "5")
    assert (found["path"], found["snapshot"], found["num_shards"]) == (str(tmp_path / "other"), "000001-full", 5)
    assert found["num_bytes"] == sum(path.stat().st_size for path in (tmp_path / "other").rglob("*.fss"))
    snapshot("diff", chain, tmp_path / "other")
    output = snapshot("reshard", chain, tmp_path / "other", "--shards", "5")
    assert output.startswith(f"{tmp_path / 'other'}/000002-full: 120 rows, 5 shards, ")


@pytest.mark.parametrize("how", ["npz", "parquet"])
def test_what_is_exported_can_be_imported(chain, tmp_path, how) -> None:
    found = in_json("export", chain, tmp_path / "out", "--format", how)
    assert (found["path"], found["format"]) == (str(tmp_path / "out"), how)
    assert found["files"][1] == {"file": f"table-sgd.{how}", "kind": "table", "name": "sgd", "num_rows": 60}
    assert f"table-sgd.{how}" in snapshot("export", chain, tmp_path / "out", "--format", how, "--force")
    assert in_json("import", tmp_path / "out", tmp_path / "other")["num_shards"] == 3
    assert_same(saved_model(tmp_path / "other"), saved_model(chain))


def test_import_takes_specs_from_a_snapshot(chain, tmp_path) -> None:
    np.savez(tmp_path / "table-sgd.npz", ids=np.arange(9), rows=np.ones((9, 2), np.float32))
    found = in_json("import", tmp_path / "table-sgd.npz", tmp_path / "other", "--like", chain, "--shards", "2")
    assert (found["num_rows"], found["num_shards"]) == (9, 2)
    assert saved_model(tmp_path / "other").tables[0].spec == SGD


@pytest.mark.parametrize("is_file", [False, True])
def test_import_takes_the_spec_of_the_one_table(tmp_path, is_file) -> None:
    np.savez(tmp_path / "pretrained.npz", ids=np.arange(9), rows=np.ones((9, 2), np.float32))
    (tmp_path / "spec.json").write_text(SGD.to_json())
    snapshot(
        "import",
        tmp_path / "pretrained.npz",
        tmp_path / "other",
        "--spec",
        tmp_path / "spec.json" if is_file else SGD.to_json(),
    )
    assert saved_model(tmp_path / "other").tables[0].spec == SGD


def test_any_url_may_be_named(chain, tmp_path) -> None:
    where = f"memory://{tmp_path.name}"
    try:
        snapshot("reshard", chain, f"{where}/model", "--shards", "2")
        snapshot("export", f"{where}/model", f"{where}/out")
        snapshot("export", f"{where}/model", f"{where}/out", "--force")
        snapshot("import", f"{where}/out", f"{where}/other")
        snapshot("import", f"{where}/out/table-sgd.npz", f"{where}/table")
        snapshot("verify", f"{where}/other")
        snapshot("diff", chain, f"{where}/other")
    finally:
        fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)


# Rules of the user's own


def test_rules_of_the_users_own_are_known(tmp_path, monkeypatch) -> None:
    (tmp_path / "our_rules.py").write_text(
        "from fleet_sparse.core.rules.sgd import sgd\nRULES = [sgd._replace(name='ours')]\n"
    )
    with monkeypatch.context() as while_saved:
        while_saved.setitem(RULES, "ours", RULES["sgd"]._replace(name="ours"))
        save(tmp_path / "model", Model((TableModel(TableSpec(name="C1", dim=2, rule="ours", initializer=ZERO), {}),)))
    ended = subprocess.run(
        [sys.executable, "-m", "fleet_sparse.cli", "snapshot", "inspect", str(tmp_path / "model"), "--json"],
        env=environment(FLEET_SPARSE_RULES="our_rules", PYTHONPATH=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["tables"][0]["rule"] == "ours"


# Checkpoints of Paddle 2.6


@pytest.fixture
def job(tmp_path):
    """What the new job saved once: the specs of its tables."""
    table = TableSpec(name="emb", dim=4, rule="adagrad", initializer=ZERO)
    dense = DenseSpec("dense", "adam", (), (Segment("w", 0, 3, 1.0), Segment("x", 3, 1, 1.0)))
    save(tmp_path / "job", Model((TableModel(table, {}),), (random_dense(np.random.default_rng(1), dense),)))
    return tmp_path / "job"


@pytest.fixture
def checkpoint(tmp_path):
    """A table of dim 4 that Adagrad trained, and a dense one that Adam did."""
    table = tmp_path / "checkpoint" / "000"
    table.mkdir(parents=True)
    lines = [f"{one} 7 0 0.1 3 1 1 0.5 2 3 4 0.5\n" for one in range(1, 6)]
    (table / "part-000-00000.gz").write_bytes(gzip.compress("".join(lines).encode()))
    dense = tmp_path / "checkpoint" / "001"
    dense.mkdir()
    (dense / "part-000.gz").write_bytes(gzip.compress(b"1 2 3\n" * 4))
    return tmp_path / "checkpoint"


def test_what_a_checkpoint_has_is_shown_where_no_table_is_named(checkpoint) -> None:
    assert "adagrad with dim 4" in snapshot("import-paddle", checkpoint)
    found = in_json("import-paddle", checkpoint)["directories"]
    assert [(each["name"], each["kind"]) for each in found] == [("000", "table"), ("001", "dense")]
    assert {"paddle_rule": "adagrad", "dim": 4} in found[0]["fits"]


def test_tables_of_a_checkpoint_are_imported(checkpoint, job, tmp_path) -> None:
    output = snapshot(
        "import-paddle",
        checkpoint,
        tmp_path / "model",
        *("--table", "000=emb", "--paddle-rule", "000=adagrad", "--dense", "001=dense"),
        *("--like", job, "--shards", "2", "--optimizer-step", "9"),
    )
    assert f"{tmp_path / 'model'}/000001-full: 5 rows, 2 shards" in output
    assert "Values are text of six digits" in output
    found = saved_model(tmp_path / "model")
    assert np.frombuffer(found.tables[0].rows[3][0], np.float32).tolist() == [1, 2, 3, 4]
    assert found.dense[0].values.tolist() == [1, 1, 1, 1]
    assert found.dense[0].optimizer_step == 9


def test_an_import_in_json_has_what_was_found_of_each_table(checkpoint, job, tmp_path) -> None:
    arguments = ("--table", "000=emb", "--paddle-rule", "000=adagrad", "--like", job)
    found = in_json("import-paddle", checkpoint, tmp_path / "model", *arguments)
    assert (found["snapshot"], found["num_rows"], found["dense"]) == ("000001-full", 5, [])
    assert (found["tables"][0]["name"], found["tables"][0]["num_rows"]) == ("emb", 5)
    assert found["notes"]


# All the error paths


def test_a_table_of_a_checkpoint_without_a_spec_is_told(checkpoint, job, tmp_path) -> None:
    with pytest.raises(SnapshotError, match=r"table 'C1': .*--like"):
        snapshot("import-paddle", checkpoint, tmp_path / "model", "--table", "000=C1", "--like", job)
    with pytest.raises(SnapshotError, match="dense 'C1'"):
        snapshot("import-paddle", checkpoint, tmp_path / "model", "--dense", "001=C1", "--like", job)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--table", "000=emb"], "Invalid value for TARGET: name the directory"),
        (["model", "--table", "000"], "'000' should be DIRECTORY=NAME"),
    ],
)
def test_wrong_argument_of_an_import_is_told(checkpoint, arguments, message) -> None:
    assert message in snapshot("import-paddle", checkpoint, *arguments, fails=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect"], "Missing argument 'SNAPSHOT'"),
        (["inspect", "model", "--id", "many"], "Invalid value for '--id'"),
        (["inspect", "model", "--id", str(1 << 63)], "Invalid value for '--id'"),
        (["inspect", "model", "--rows", "-1"], "Invalid value for '--rows'"),
        (["diff", "model"], "Missing argument 'SECOND'"),
        (["diff", "model", "model", "--tolerance", "-1"], "Invalid value for '--tolerance'"),
        (["reshard", "model", "other"], "Missing option '--shards'"),
        (["reshard", "model", "other", "--shards", "0"], "Invalid value for '--shards'"),
        (["export", "model", "other", "--format", "csv"], "Invalid value for '--format'"),
        (["import", "model", "other", "--like", "model", "--spec", "{}"], "--like and --spec"),
        (["import", "model", "other", "--spec", "{}"], "Invalid value for --spec"),
        (["import", "model", "other", "--spec", "no-such-file"], "Invalid value for --spec"),
    ],
)
def test_wrong_argument_is_told_without_a_trace(arguments, message) -> None:
    output = snapshot(*arguments, fails=2)
    assert message in output
    assert "Traceback" not in output


# shrink


def test_a_dry_run_reports_which_rows_go_and_writes_nothing(tmp_path):
    rows = {id_: (np.full(2, id_, np.float32).tobytes(), b"", id_) for id_ in range(5)}
    save(tmp_path / "model", Model((TableModel(SGD, rows, days=4),)))
    found = in_json("shrink", tmp_path / "model", "--unseen-days", 2, "--min-norm", 4, "--dry-run")
    assert found["written"] is None
    assert [(each["why"], each["num_rows"], sorted(each["examples"])) for each in found["removed"]] == [
        ("unseen for more than 2 days", 2, [0, 1]),
        ("norm below 4", 1, [2]),
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert "norm below 4" in snapshot("shrink", tmp_path / "model", "--min-norm", 4, "--dry-run")


def test_shrink_writes_a_snapshot_of_the_rows_that_stay(tmp_path):
    model = random_model(1, days=9)
    save(tmp_path / "model", model, 2)
    written = in_json("shrink", tmp_path / "model", tmp_path / "small", "--unseen-days", 3, "--shards", 3)["written"]
    assert written["num_shards"] == 3
    for table, before in zip(saved_model(tmp_path / "small").tables, model.tables, strict=True):
        assert table.rows == {id_: row for id_, row in before.rows.items() if 9 - row[2] <= 3}


def test_rows_with_a_low_count_go(tmp_path):
    job = CountedJob(count_filter(1), num_shards=2)
    for ids in ([1, 2, 3, 4], [1, 2, 3], [1, 2], [1]):
        job.push(np.array(ids))
    save_shards(job.shards, tmp_path / "model")
    found = in_json("shrink", tmp_path / "model", tmp_path / "small", "--min-score", 4)
    assert [(each["table"], each["num_rows"]) for each in found["removed"]] == [("emb", 2)]
    with open_content(str(tmp_path / "small")) as content:
        assert [id_ for rows in content.rows("emb") for id_ in rows.ids.tolist()] == [1]
        assert {id_ for rows in content.rows("emb@entry") for id_ in rows.ids.tolist()} == {1, 2, 3, 4}
    job.close()


def test_only_named_tables_shrink(tmp_path):
    save(tmp_path / "model", random_model(1, days=9))
    found = in_json("shrink", tmp_path / "model", "--unseen-days", 3, "--table", "sgd", "--dry-run")
    assert [each["table"] for each in found["removed"]] == ["sgd"]
    with pytest.raises(SnapshotError, match="'none'"):
        snapshot("shrink", tmp_path / "model", "--unseen-days", 3, "--table", "none", "--dry-run")


def test_tables_without_scores_are_named(tmp_path):
    save(tmp_path / "model", random_model(1))
    assert "'sgd'" in snapshot("shrink", tmp_path / "model", "--min-score", 1, "--dry-run").splitlines()[-1]
    assert "scores" not in snapshot("shrink", tmp_path / "model", "--min-norm", 1, "--dry-run")


def test_shrink_without_a_target_is_a_usage_error(tmp_path):
    save(tmp_path / "model", random_model(1))
    snapshot("shrink", tmp_path / "model", "--min-norm", 1, fails=2)


def test_shrink_without_a_criterion_is_refused(tmp_path):
    save(tmp_path / "model", random_model(1))
    with pytest.raises(SettingError, match="--min-score"):
        snapshot("shrink", tmp_path / "model", "--dry-run")
