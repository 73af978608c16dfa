"""A follower against series that grow, skip, tear, go back and vanish."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fleet_sparse.core.initializer import initial_rows
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.core.version import Version
from fleet_sparse.pserver.read_only.content import load
from fleet_sparse.pserver.read_only.follower import RETRY_S, Follower
from fleet_sparse.pserver.read_only.shard import ReadOnlyShard, spec_of_reads
from fleet_sparse.snapshot.directory import directory_at
from fleet_sparse.snapshot.serve_file import ServeFile, write_serve_file
from fleet_sparse.snapshot.store import open_chain
from support.saves import at_once
from support.snapshots import ADAM, DENSE, SGD, Model, Row, TableModel, random_dense, random_model, random_row, save

KEEP_S = 5.0


class Series:
    """A series with the model that each snapshot stands for, a follower of it, and its clock."""

    def __init__(self, where: Path, num_savers: int = 2, shard: int = 0, num_shards: int = 1) -> None:
        self.where, self.num_savers = where, num_savers
        self.rng = np.random.default_rng(0)
        self.now = 0.0
        self.model = random_model(0)
        self.ever = {spec.name: set(table.rows) for spec, table in zip((ADAM, SGD), self.model.tables, strict=True)}
        self.truth: dict[Version, Model] = {}
        self.full(self.model)
        self.shard = ReadOnlyShard(shard, num_shards, cluster_id=1, incarnation=2, huge_pages=False)
        load(self.shard, open_chain(directory_at(str(where))))
        self.follower = Follower(
            self.shard, directory_at(str(where)), at_once, version_keep_s=KEEP_S, clock=lambda: self.now
        )

    def full(self, model: Model | None = None) -> str:
        """Saves all rows."""
        self.model = model or self.model
        return self._saved(save(self.where, self.model, self.num_savers))

    def delta(self, num_changed: int = 20, num_removed: int = 5) -> str:
        """Saves changed, new and removed rows."""
        tables, changes, removed = [], [], {}
        for table in self.model.tables:
            known = list(table.rows)
            gone = set(self.rng.choice(known, num_removed, replace=False).tolist())
            ids = [id_ for id_ in self.rng.choice(known, num_changed, replace=False).tolist() if id_ not in gone]
            ids += self.rng.integers(-(2**63), 2**63, 5).tolist()
            new: dict[int, Row] = {id_: random_row(self.rng, table.spec) for id_ in ids}
            rows = {id_: row for id_, row in table.rows.items() if id_ not in gone} | new
            tables.append(table._replace(rows=rows))
            changes.append(table._replace(rows=new))
            removed[table.spec.name] = gone
            self.ever[table.spec.name] |= set(new)
        dense = (random_dense(self.rng),)
        self.model = Model(tuple(tables), dense)
        return self._saved(
            save(self.where, Model(tuple(changes), dense), self.num_savers, kind="delta", removed=removed)
        )

    def _saved(self, name: str) -> str:
        manifest = open_chain(directory_at(str(self.where / name)))[-1][1]
        self.newest = Version(manifest.number, int(manifest.checksum))
        self.truth[self.newest] = self.model
        return name

    def look(self, after_s: float = KEEP_S) -> bool:
        """Lets time pass, and the follower look once."""
        self.now += after_s
        return self.follower.look()

    def check(self) -> None:
        """Every version that can be read is exactly the model of its snapshot."""
        for index, version in enumerate(self.shard.versions):
            model = self.truth[version]
            for table in model.tables:
                spec = table.spec
                all_ids = np.array(sorted(self.ever[spec.name]), np.int64)
                ids = all_ids[self.shard.placement.shard_of(all_ids, spec.salt) == self.shard.shard_index]
                out = np.empty((len(ids), spec.dim), np.float32)
                self.shard.tables[spec.table_id].rows.pull(ids, out, is_older=index == 1)
                expected = b"".join(
                    table.rows[id_][0] if id_ in table.rows else initial(spec, id_) for id_ in ids.tolist()
                )
                assert out.tobytes() == expected, (version, spec.name)
            array = self.shard.arrays[DENSE.table_id]
            values = array.values.newest if index == 0 else array.values.older
            assert values is not None
            assert values.tobytes() == model.dense[0].values[array.begin : array.end].tobytes()


def initial(spec: TableSpec, id_: int) -> bytes:
    spec = spec_of_reads(spec)
    ids = np.array([id_], np.int64)
    return initial_rows(spec.initializer, ids, dim=spec.dim, seed=spec.seed, salt=spec.salt).tobytes()


@pytest.fixture
def series(tmp_path: Path) -> Iterator[Series]:
    made = Series(tmp_path / "rows")
    yield made
    made.shard.close()


@pytest.mark.parametrize(("num_savers", "shard", "num_shards"), [(1, 0, 1), (2, 2, 3), (3, 1, 2)])
def test_each_delta_is_adopted(tmp_path: Path, num_savers: int, shard: int, num_shards: int) -> None:
    series = Series(tmp_path / "rows", num_savers, shard, num_shards)
    series.check()
    for _ in range(4):
        before = series.shard.newest
        series.delta()
        assert series.look()
        assert series.shard.versions == (series.newest, before)
        series.check()
    assert not series.look()
    series.shard.close()


def test_several_waiting_deltas_are_one_step(series: Series) -> None:
    first = series.newest
    for _ in range(3):
        series.delta()
    assert series.look()
    assert series.shard.versions == (series.newest, first)
    series.check()


def test_a_version_is_kept_for_some_seconds(series: Series) -> None:
    series.delta()
    assert series.look()
    kept = series.shard.versions
    series.delta()
    assert not series.look(after_s=KEEP_S / 2)
    assert series.shard.versions == kept
    assert series.look(after_s=KEEP_S / 2)
    series.check()


def test_a_full_snapshot_is_adopted_as_its_difference(series: Series) -> None:
    series.delta()
    tables = [table._replace(rows=dict(list(table.rows.items())[3:])) for table in series.model.tables]
    series.full(Model(tuple(tables), (random_dense(series.rng),)))
    assert series.look()
    series.check()
    num_changed = series.shard.tables[SGD.table_id].rows.num_changed
    assert 0 < num_changed < 40


def test_a_removed_base_leaves_a_difference(series: Series) -> None:
    old = "000001-full"
    series.delta()
    series.full()
    shutil.rmtree(series.where / old)
    series.delta()
    assert series.look()
    series.check()


def test_a_removed_newest_snapshot_is_a_way_back(series: Series) -> None:
    first = series.newest
    name = series.delta()
    assert series.look()
    gone = series.newest
    shutil.rmtree(series.where / name)
    assert series.look()
    assert series.shard.versions == (first, gone)
    series.check()


def test_a_number_that_is_used_again_is_another_version(series: Series) -> None:
    model = series.model
    name = series.delta()
    assert series.look()
    before = series.newest
    shutil.rmtree(series.where / name)
    series.model = model
    assert series.delta() == name
    assert series.newest.number == before.number
    assert series.look()
    assert series.shard.versions == (series.newest, before)
    series.check()


def serve(series: Series, pinned: Version | None) -> None:
    directory = directory_at(str(series.where))
    write_serve_file(directory, ServeFile().changed("promote", pinned, None, changed_at=""))


def test_the_version_before_is_served_again_from_memory(series: Series) -> None:
    first = series.newest
    series.delta()
    second = series.newest
    assert series.look()
    rows_files = list(series.where.glob("*/*.fss"))
    assert len(rows_files) == 2 * series.num_savers
    for path in rows_files:
        path.write_bytes(b"")
    for version, other in ((first, second), (second, first)):
        serve(series, version)
        assert series.look()
        assert series.shard.versions == (version, other)
        series.check()


def test_a_named_version_is_adopted_and_kept(series: Series) -> None:
    versions = [series.newest]
    for _ in range(3):
        series.delta()
        assert series.look()
        versions.append(series.newest)
    serve(series, versions[1])
    assert series.look()
    assert series.shard.versions == (versions[1], versions[3])
    series.check()
    series.full(random_model(0))
    assert not series.look()
    serve(series, versions[2])
    assert series.look()
    assert series.shard.versions == (versions[2], versions[1])
    series.check()
    serve(series, None)
    assert series.look()
    assert series.shard.versions == (series.newest, versions[2])
    series.check()


@pytest.mark.parametrize("damage", [b"{}", b"", None])
def test_a_bad_serve_file_keeps_the_version_until_it_is_mended(
    series: Series, damage: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    first = series.newest
    series.delta()
    assert series.look()
    before = series.shard.versions
    if damage is None:
        serve(series, Version(1, 5))
    else:
        (series.where / "SERVE.json").write_bytes(damage)
    series.delta()
    assert not series.look()
    assert not series.look()
    assert series.shard.versions == before
    assert series.follower.stats.num_failed == 2
    assert "SERVE.json" in series.follower.stats.last_failure
    assert caplog.text.count("SERVE.json") == 1
    series.check()
    serve(series, first)
    assert not series.look(after_s=RETRY_S / 2)
    assert series.look(after_s=RETRY_S)
    assert (series.shard.newest, series.follower.stats.last_failure) == (first, "")
    series.check()


def torn_file(series: Series, name: str) -> tuple[Path, bytes]:
    """Cuts the end of a file off; returns its path, and what it was."""
    path = series.where / name / "shard-1-of-2.fss"
    content = path.read_bytes()
    path.write_bytes(content[:-100])
    return path, content


def flipped_file(series: Series, name: str) -> tuple[Path, bytes]:
    """Flips a bit of the first block of a file."""
    path = series.where / name / "shard-1-of-2.fss"
    content = path.read_bytes()
    path.write_bytes(content[:70] + bytes([content[70] ^ 1]) + content[71:])
    return path, content


@pytest.mark.parametrize("damage", [torn_file, flipped_file])
@pytest.mark.parametrize("kind", ["full", "delta"])
def test_a_damaged_snapshot_changes_nothing_until_it_is_mended(
    series: Series, damage: object, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = series.shard.versions
    name = series.delta() if kind == "delta" else series.full(random_model(1))
    series.ever = {table.spec.name: series.ever[table.spec.name] | set(table.rows) for table in series.model.tables}
    path, content = damage(series, name)  # type: ignore[operator]
    assert not series.look()
    assert series.shard.versions == before
    assert not series.look(after_s=RETRY_S)
    assert (series.follower.stats.num_failed, "SnapshotCorrupt" in series.follower.stats.last_failure) == (2, True)
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len(warnings) == 1
    assert [fact for fact in ("shard 0", "SnapshotCorrupt", str(path)) if fact not in warnings[0]] == []
    series.check()
    path.write_bytes(content)
    assert not series.look(after_s=RETRY_S / 2)
    assert series.look(after_s=RETRY_S)
    assert series.follower.stats.last_failure == ""
    series.check()


def test_a_vanished_series_leaves_the_served_version(series: Series) -> None:
    before = series.shard.versions
    shutil.rmtree(series.where)
    assert not series.look()
    assert series.follower.stats.last_failure
    assert series.shard.versions == before
    series.check()


def test_a_snapshot_that_vanishes_while_read_is_skipped(series: Series, monkeypatch: pytest.MonkeyPatch) -> None:
    name = series.delta()
    follower_module = "fleet_sparse.pserver.read_only.follower.deltas"
    from fleet_sparse.pserver.read_only import follower as module

    genuine = module.deltas

    def vanishes(*arguments: object) -> object:
        shutil.rmtree(series.where / name)
        return genuine(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(follower_module, vanishes)
    before = series.shard.versions
    assert not series.look()
    assert series.follower.stats.num_failed == 1
    assert not series.look()
    assert series.shard.versions == before
    series.check()


def test_a_snapshot_of_another_model_is_not_adopted(series: Series) -> None:
    before, model = series.shard.versions, series.model
    wider = TableModel(replace(SGD, dim=5), {})
    name = save(series.where, Model((model.tables[0], wider), model.dense))
    assert not series.look()
    failure = series.follower.stats.last_failure
    assert ("'sgd'" in failure, "dim 2 and 5" in failure) == (True, True)
    assert series.shard.versions == before
    shutil.rmtree(series.where / name)
    series.full(model)
    assert series.look()
    series.check()


def test_a_failure_while_rows_are_applied_restores_them(series: Series, monkeypatch: pytest.MonkeyPatch) -> None:
    apply, before = series.shard.apply, series.shard.newest
    num_calls = 0

    def fails(*arguments: object) -> int:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise MemoryError("no room")
        return apply(*arguments)  # type: ignore[arg-type]

    series.delta()
    monkeypatch.setattr(series.shard, "apply", fails)
    assert not series.look()
    assert series.shard.versions == (before,)
    series.check()
    assert series.look()
    series.check()


def test_a_thread_follows_until_it_is_stopped(series: Series) -> None:
    import threading

    adopted = threading.Event()
    follower = Follower(
        series.shard,
        directory_at(str(series.where)),
        at_once,
        version_keep_s=0.001,
        on_change=adopted.set,
    )
    follower.start()
    with suppress(Exception):
        series.delta()
    assert adopted.wait(30)
    follower.stop()
    assert series.shard.newest == series.newest
    series.check()
