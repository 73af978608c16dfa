from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.ids import NUM_BUCKETS
from fleet_sparse.core.initializer import constant
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import SnapshotCorrupt
from fleet_sparse.snapshot.directory import directory_at
from fleet_sparse.snapshot.manifest import DELTA, FULL, Manifest
from fleet_sparse.snapshot.reader import open_content
from fleet_sparse.snapshot.store import SnapshotStore
from fleet_sparse.tools.snapshots.reshard import reshard
from support.snapshots import (
    ADAM,
    DENSE,
    SAVED_AT,
    SGD,
    Model,
    Row,
    TableModel,
    assert_same,
    commit_unchecked,
    model_of,
    random_dense,
    random_model,
    random_row,
    save,
    save_one_id_twice,
    saved_model,
    write_file,
)

UNEVEN = Placement(2, 2, np.arange(NUM_BUCKETS) % 2)


class Change(NamedTuple):
    """What one snapshot of a history adds to the one before."""

    num_shards: int
    is_full: bool
    upserts: list[int]
    removed: list[int]
    ends_day: bool


IDS = st.lists(st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63), *range(2, 12)]), unique=True)
CHANGES = st.builds(Change, st.sampled_from([1, 2, 3, 5, 8]), st.booleans(), IDS, IDS, st.booleans())


def played(where: Path, changes: list[Change]) -> list[Model]:
    """Saves a history of changes of `ADAM`'s rows, the first as a full snapshot; what each snapshot says."""
    rng = np.random.default_rng(len(changes))
    models: list[Model] = []
    rows: dict[int, Row] = {}
    days = 0
    for number, change in enumerate(changes):
        days += change.ends_day
        is_full = change.is_full or not models
        pushed = {one: random_row(rng, ADAM, int(rng.integers(0, days + 1))) for one in change.upserts}
        rows = {one: row for one, row in rows.items() if one not in change.removed} | pushed
        dense = (random_dense(rng, optimizer_step=number),)
        models.append(Model((TableModel(ADAM, rows, number, days),), dense))
        stored = models[-1] if is_full else Model((TableModel(ADAM, pushed, number, days),), dense)
        kind = FULL if is_full else DELTA
        save(where, stored, change.num_shards, kind=kind, removed={ADAM.name: change.removed})
    return models


@settings(max_examples=40)
@given(st.lists(CHANGES, min_size=1, max_size=5), st.sampled_from([1, 2, 3, 5, 8]))
def test_any_history_is_its_model_on_any_number_of_shards(
    tmp_path_factory: pytest.TempPathFactory, changes: list[Change], num_shards: int
) -> None:
    where = tmp_path_factory.mktemp("series")
    models = played(where / "model", changes)
    for name, model in zip(SnapshotStore(directory_at(where / "model")).snapshots(), models, strict=True):
        assert_same(saved_model(where / "model" / name), model)
    with open_content(str(where / "model")) as content:
        reshard(content, directory_at(where / "other"), num_shards)
    assert_same(saved_model(where / "other"), models[-1])


def test_the_largest_step_and_day_of_all_shards_count(tmp_path: Path) -> None:
    models = [Model((TableModel(SGD, {}, optimizer_step=step, days=days),)) for step, days in ((3, 2), (7, 1))]
    (found,) = saved_model(saved_by(tmp_path, *models)).tables
    assert (found.optimizer_step, found.days) == (7, 2)


def test_a_range_of_dense_values_is_that_part_of_all(tmp_path: Path) -> None:
    model = random_model(1)
    save(tmp_path, model, 3)
    with open_content(str(tmp_path)) as content:
        values, states = content.dense_values(DENSE.name, 2, 9)
    assert values.tobytes() == model.dense[0].values[2:9].tobytes()
    assert states.tobytes() == model.dense[0].states[:, 2:9].tobytes()


def test_a_dense_array_is_assigned_if_all_its_ranges_are(tmp_path: Path) -> None:
    dense = random_dense(np.random.default_rng(1))
    directory = directory_at(tmp_path)
    series = SnapshotStore(directory)
    plan = series.plan(FULL, "save")
    files = [
        write_file(
            series.target(plan, "save"), Model(dense=(dense._replace(assigned=bool(shard)),)), shard=shard, num_shards=2
        )
        for shard in (0, 1)
    ]
    commit_unchecked(series, plan, Manifest(1, FULL, None, "save", SAVED_AT, (), True, tuple(files), ()))
    with open_content(str(tmp_path)) as content:
        assert not content.dense[DENSE.name].assigned


def test_a_placement_of_its_own_is_merged(tmp_path: Path) -> None:
    model = random_model(1)
    save(tmp_path, model, 2, placement=UNEVEN)
    assert_same(saved_model(tmp_path), model)


def test_bytes_read_are_told(tmp_path: Path) -> None:
    save(tmp_path, random_model(1), 2)
    told: list[int] = []
    with open_content(str(tmp_path), told.append) as content:
        model_of(content)
        assert told == sorted(told)
        assert told[-1] == content.num_bytes_read == content.num_bytes


def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    wide = TableSpec(name="wide", dim=64, rule="sgd", initializer=constant(0.0))
    rng = np.random.default_rng(1)
    row = random_row(rng, wide)
    rows = dict.fromkeys(rng.integers(-(2**63), 2**63, 100_000).tolist(), row)
    save(tmp_path, Model((TableModel(wide, rows),)), 4)
    changed = dict.fromkeys(list(rows)[:20_000], row)
    save(tmp_path, Model((TableModel(wide, changed),)), 3, kind=DELTA, removed={"wide": list(rows)[20_000:30_000]})
    num_rows = 0
    with open_content(str(tmp_path)) as content:
        tracemalloc.start()
        for block in content.rows("wide"):
            num_rows += len(block.ids)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert num_rows == 90_000
    assert peak < 20 << 20 < content.num_bytes, "two reads of each snapshot, and what is put together of them"


# Error paths


def refuses(where: Path) -> SnapshotCorrupt:
    with pytest.raises(SnapshotCorrupt) as caught, open_content(str(where)):
        pass
    return caught.value


def saved_by(tmp_path: Path, *models: Model, **changes: object) -> Path:
    """A snapshot whose shards were written from a model each."""
    series = SnapshotStore(directory_at(tmp_path))
    plan = series.plan(FULL, "save")
    target = series.target(plan, "save")
    files = [
        write_file(target, model, shard=shard, num_shards=len(models), **changes) for shard, model in enumerate(models)
    ]
    commit_unchecked(series, plan, Manifest(1, FULL, None, "save", SAVED_AT, (), True, tuple(files), ()))
    return tmp_path


def test_shards_that_describe_a_table_differently_are_told(tmp_path: Path) -> None:
    specs = [SGD, TableSpec(name="sgd", dim=4, rule="sgd", initializer=constant(0.5))]
    where = saved_by(tmp_path, *(Model((TableModel(spec, {}),)) for spec in specs))
    refuses(where)


def test_a_chain_that_describes_a_table_differently_is_told(tmp_path: Path) -> None:
    save(tmp_path, Model((TableModel(SGD, {}),)))
    reading = TableSpec(name="sgd", dim=2, rule="read_only", initializer=constant(0.5))
    save(tmp_path, Model((TableModel(reading, {}),)), kind=DELTA)
    refuses(tmp_path)


def test_a_dense_array_without_one_of_its_ranges_is_told(tmp_path: Path) -> None:
    where = saved_by(tmp_path, Model(dense=(random_dense(np.random.default_rng(1)),)), Model())
    refuses(where)


def test_dense_arrays_of_another_description_are_told(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    other = DenseSpec(DENSE.name, DENSE.rule, (("beta1", 0.5),), DENSE.segments)
    where = saved_by(tmp_path, Model(dense=(random_dense(rng),)), Model(dense=(random_dense(rng, other),)))
    refuses(where)


def test_an_id_of_another_shard_is_told_with_its_block(tmp_path: Path) -> None:
    rows = {one: random_row(np.random.default_rng(1), SGD) for one in range(20)}
    model = Model((TableModel(SGD, rows),))
    everything = Placement(1, 2, np.zeros(NUM_BUCKETS, np.int32))
    where = saved_by(tmp_path, model, Model((TableModel(SGD, {}),)), placement=everything)
    assert refuses(where).offset == 64


def test_an_id_of_two_files_is_told(tmp_path: Path) -> None:
    save_one_id_twice(tmp_path)
    with open_content(str(tmp_path)) as content, pytest.raises(SnapshotCorrupt):
        list(content.rows("sgd"))
