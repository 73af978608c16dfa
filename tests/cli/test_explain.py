"""`fleet-sparse explain`: arguments and output."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fleet_sparse import cli
from fleet_sparse.core.entries import Entry
from fleet_sparse.errors import SnapshotError
from support.admissions import CountedJob, count_filter, table
from support.saves import save

KINDS = pytest.mark.parametrize("sketch", [False, True], ids=["exact", "sketch"])


def explained(*arguments: object) -> str:
    result = CliRunner().invoke(cli.app, ["explain", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def in_json(*arguments: object) -> dict[int, dict[str, object]]:
    return {each["id"]: each for each in json.loads(explained(*arguments, "--json"))["ids"]}


@KINDS
def test_counts_and_rows_of_ids_are_explained(tmp_path: Path, sketch: bool) -> None:
    job = CountedJob(count_filter(3, sketch=sketch), num_shards=3)
    for ids in ([1, 2, 3], [1, 2], [1], [1]):
        job.push(np.array(ids))
    save(job.shards, tmp_path)
    found = in_json(tmp_path, 1, 2, 3, 4)
    assert [found[id_]["totals"] for id_ in (2, 3, 4)] == [{"counts": 2}, {"counts": 1}, {"counts": 0}]
    assert [found[id_]["is_admitted"] for id_ in (1, 2, 3)] == [True, False, False]
    assert found[1]["norm"] == pytest.approx(0.25 * 2**0.5)
    assert found[2]["norm"] is None
    for id_ in (1, 2, 3, 4):
        (owner,) = job.placement.shard_of(np.array([id_]), job.spec.salt)
        assert found[id_]["shard"] == owner
    assert "counts 2" in explained(tmp_path, 2)
    job.close()


@KINDS
def test_an_admitted_id_without_a_row_is_explained(tmp_path: Path, sketch: bool) -> None:
    job = CountedJob(count_filter(1, sketch=sketch))
    job.push(np.array([-7]))
    save(job.shards, tmp_path)
    found = json.loads(explained("--table", "emb", "--json", tmp_path, "--", -7))["ids"][0]
    assert (found["norm"], found["is_admitted"]) == (None, True)
    job.close()


def test_a_policy_without_counts_has_no_totals(tmp_path: Path) -> None:
    job = CountedJob(table(Entry("probability", (("probability", 0.0),))))
    save(job.shards, tmp_path)
    found = in_json(tmp_path, 5)[5]
    assert (found["entry"], found["is_admitted"], found["totals"]) == ("probability(probability=0, seed=0)", False, {})
    job.close()


def test_an_unknown_table_is_refused(tmp_path: Path) -> None:
    job = CountedJob(count_filter(1))
    save(job.shards, tmp_path)
    job.close()
    with pytest.raises(SnapshotError, match="'none'"):
        explained(tmp_path, 5, "--table", "none")
