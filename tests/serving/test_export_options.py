"""Options of `fleet-sparse export` that choose rows, on a table that counts its ids."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
import pytest
from typer.testing import CliRunner

from fleet_sparse import cli, machine_memory
from fleet_sparse.errors import PlanError
from fleet_sparse.serving.dictionary import verify_dictionary
from fleet_sparse.snapshot.reader import open_content
from support.programs import flagged, ids_input, linear, minimize, start

FIRST = "serve/rows/000001-full"
SAVED = [[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2], [1]]
LATER = [[3, 4], [3, 4], [3, 4]]
"""Ids of the steps before the first save, which has counts of 5, 4 and 3, and of those after it."""


@pytest.fixture(autouse=True)
def model(plugin, unchecked, tmp_path, monkeypatch):
    """A model of a table that counts, `emb`, and one that does not, `other`; saved twice."""
    monkeypatch.chdir(tmp_path)
    fleet.init()
    ids = ids_input()
    counted = flagged(ids, value=None, entry=paddle.distributed.CountFilterEntry(2))
    prediction = linear(counted + flagged(ids, "other", 0.25))
    minimize(paddle.mean(paddle.square(prediction - 1.0)), paddle.optimizer.SGD(0.1))
    executor = start()
    for step in SAVED:
        executor.run(feed={"ids": np.array(step)}, fetch_list=[])
    fleet.save_inference_model(executor, "serve", ["ids"], [prediction])
    for step in LATER:
        executor.run(feed={"ids": np.array(step)}, fetch_list=[])
    fleet.save_persistables(executor, "serve/rows", mode=1)
    yield tmp_path
    fleet.stop_worker()


def export(*arguments):
    result = CliRunner().invoke(cli.app, ["export", "serve", "out", *arguments])
    if result.exception is not None:
        raise result.exception
    return result.output


def as_int8(where, table, ids):
    """What is printed of the rows of some ids as int8, computed here."""
    with open_content(where) as content:
        blocks = list(content.rows(table))
    known = np.concatenate([block.ids for block in blocks]).tolist()
    rows = np.concatenate([block.rows for block in blocks])
    chosen = rows[[known.index(one) for one in ids]]
    scales = np.abs(chosen).max(axis=1, keepdims=True) / np.float32(127)
    errors = (np.rint(chosen / scales) * scales - chosen).astype(np.float64)
    assert np.abs(errors).max() > 0
    return len(ids), pytest.approx(np.abs(errors).max(), 5e-3), pytest.approx(np.sqrt((errors**2).mean()), 5e-3)


def printed(output):
    """Number of rows, largest error and RMS of each table, as printed."""
    found = re.findall(r"table '(\w+)': (\d+) rows, int8, largest error (\S+), RMS (\S+)", output)
    return {name: (int(num_rows), float(largest), float(rms)) for name, num_rows, largest, rms in found}


def test_rows_of_a_snapshot_with_a_count_are_exported():
    chosen = ["--format", "dictionary", "--table", "emb", "--min-count", "4", "--dtype", "int8"]
    for options, where, ids in ([], "serve/rows", [1, 2, 3]), (["--snapshot", FIRST], FIRST, [1, 2]):
        output = export(*chosen, *options)
        assert printed(output) == {"emb": as_int8(where, "emb", ids)}
        assert ("000001-full" in output) is (where == FIRST)
        (table,) = verify_dictionary(Path("out"))
        assert (table.name, table.num_rows, table.dtype) == ("emb", len(ids), "int8")


def test_the_errors_of_each_table_of_a_model_are_printed(model):
    every = {"emb": as_int8("serve/rows", "emb", [1, 2, 3, 4]), "other": as_int8("serve/rows", "other", [1, 2, 3, 4])}
    assert printed(export("--dtype", "int8")) == every
    assert printed(export("--dtype", "int8", "--format", "dictionary")) == every


def test_a_count_is_refused_for_a_table_without_counts():
    with pytest.raises(PlanError, match="table 'other': --min-count 4"):
        export("--min-count", "4")


def test_more_than_half_of_the_available_memory_is_forced(model, monkeypatch):
    monkeypatch.setattr(machine_memory, "available_bytes", lambda: 64)
    for to in ("paddle", "dictionary"):
        with pytest.raises(PlanError, match="--force"):
            export("--format", to)
    assert not (model / "out").exists()
    for to in ("paddle", "dictionary"):
        assert "table 'emb': 4 rows, float32" in export("--format", to, "--force")
