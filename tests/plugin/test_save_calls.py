"""Saving, loading and resuming in user programs, with the pserver inside this process."""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
import pytest

import fleet_sparse
from fleet_sparse.core.ids import table_salt
from fleet_sparse.errors import FleetSparseError, PlanError, ShardUnavailable, SnapshotError
from fleet_sparse.plugin.active_session import active
from fleet_sparse.worker.control.control import ControlClient
from fleet_sparse.worker.control.snapshot_rpcs import SnapshotRpcs
from fleet_sparse.worker.rows.row_batch import RowBatch
from support.programs import DIM, flagged, ids_input, linear, weight

JOIN_S = 20.0


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLEET_SPARSE_ROOT", str(tmp_path))
    return tmp_path


def strategy_of(kind: str) -> Any:
    strategy = fleet_sparse.PserverStrategy()
    strategy.a_sync = kind != "sync"
    if kind == "geo":
        strategy.a_sync_configs = {"k_steps": 4}
    return strategy


class Job:
    """A small model with two tables and a dense layer, trained by one worker."""

    def __init__(self, *, kind: str = "sync", optimizer: Any = paddle.optimizer.Adam) -> None:
        item, user = (ids_input((-1, 2), name) for name in ("item", "user"))
        rows = [paddle.sum(flagged(ids, name, None), axis=1) for ids, name in ((item, "items"), (user, "users"))]
        logit = linear(paddle.concat(rows, axis=1))
        self.loss = paddle.mean(paddle.square(logit - 3.0))
        fleet.distributed_optimizer(optimizer(0.05), strategy_of(kind)).minimize(self.loss)
        self.test = paddle.static.default_main_program().clone(for_test=True)
        self.executor = paddle.static.Executor(paddle.CPUPlace())
        self.executor.run(paddle.static.default_startup_program())

    def step(self, feed: Any) -> str:
        """The loss, bit by bit."""
        return float(self.executor.run(feed=feed, fetch_list=[self.loss])[0]).hex()

    def train(self, num_steps: int, first: int = 0) -> list[str]:
        return [self.step(feed_of(number)) for number in range(first, first + num_steps)]

    def evaluate(self) -> str:
        return float(self.executor.run(self.test, feed=feed_of(0), fetch_list=[self.loss])[0]).hex()


def feed_of(number: int) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    return {name: rng.integers(0, 20, (6, 2)) for name in ("item", "user")}


@contextmanager
def job(load: str | None = None, **options: Any) -> Iterator[Job]:
    """Runs a job that ends without `stop_worker`."""
    paddle.enable_static()
    fleet_sparse.install()
    try:
        with (
            paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()),
            paddle.static.scope_guard(paddle.static.Scope()),
            paddle.utils.unique_name.guard(),
        ):
            fleet.init()
            made = Job(**options)
            fleet.init_server(load)
            fleet.init_worker()
            yield made
    finally:
        fleet_sparse.uninstall()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def manifest(snapshot: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((snapshot / "MANIFEST.json").read_text())
    return value


class Gate:
    """Blocks the writing of pservers, or makes it fail.

    Attributes:
        reached: Set when a save begins to write.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Event()
        self.error: Exception | None = None
        self._open = threading.Event()
        stock = SnapshotRpcs.write_save

        def write_save(control: SnapshotRpcs, save_id: str) -> Any:
            self.reached.set()
            assert self._open.wait(JOIN_S)
            if self.error is not None:
                raise self.error
            return stock(control, save_id)

        monkeypatch.setattr(SnapshotRpcs, "write_save", write_save)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def saved() -> None:
    """Returns when no save is running."""
    with active().snapshots.queue.none_under_way():
        pass


# fleet_sparse.save


def test_log_names_the_snapshot_that_a_job_can_start_from(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fleet_sparse.plugin.save_queue")
    with job() as trained:
        trained.train(3)
        fleet_sparse.save("model")
        trained_to = trained.evaluate()
    (logged,) = [record for record in caplog.records if record.name == "fleet_sparse.plugin.save_queue"]
    where = logged.getMessage().removeprefix("saved ").partition(",")[0]
    assert where == str(root / "model" / "000001-full")
    with job(load=where) as resumed:
        assert resumed.evaluate() == trained_to


@pytest.mark.parametrize("kind", ["sync", "async", "geo"])
def test_manifest_has_the_number_of_trained_steps(root: Path, kind: str) -> None:
    with job(kind=kind) as trained:
        trained.train(7)
        fleet_sparse.save("model")
    assert manifest(root / "model" / "000001-full")["workers"] == [{"worker": 0, "step": 7, "position": None}]


def test_refused_save_names_the_last_snapshot(root: Path) -> None:
    with job() as trained:
        trained.train(1)
        fleet_sparse.save("model")
        with pytest.raises(SnapshotError, match=r"outside.*model/000001-full"):
            fleet_sparse.save("../outside")
        trained.train(1)
        fleet_sparse.save("model")
    assert names(root / "model") == ["000002-full"]


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(
    ("call", "name"),
    [(lambda: fleet_sparse.save("model"), "save"), (fleet_sparse.resume_step, "resumable or resume_step")],
)
def test_calls_before_init_worker_are_refused(call: Callable[[], object], name: str) -> None:
    with pytest.raises(FleetSparseError, match=rf"^{name}: .*fleet\.init_worker\(\)"):
        call()


# In the background


def test_snapshot_excludes_steps_trained_while_it_is_written(root: Path, gate: Gate) -> None:
    with job() as trained:
        trained.train(5)
        fleet_sparse.save("model", wait=False)
        after = trained.train(5, first=5)
        gate.open()
        saved()
    with job("model") as trained:
        assert trained.train(5, first=5) == after


def test_a_save_waits_for_the_one_before_it(root: Path, gate: Gate) -> None:
    with job() as trained:
        trained.train(1)
        fleet_sparse.save("model", keep_last=None, wait=False)
        assert gate.reached.wait(JOIN_S)
        thread = threading.Thread(target=lambda: fleet_sparse.save("model", keep_last=None), daemon=True)
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        gate.open()
        thread.join(JOIN_S)
    assert names(root / "model") == ["000001-full", "000002-full"]


def test_stop_worker_waits_for_a_save(root: Path, gate: Gate) -> None:
    with job() as trained:
        trained.train(1)
        fleet_sparse.save("model", wait=False)
        opening = threading.Timer(0.2, gate.open)
        opening.start()
        fleet.stop_worker()
        assert names(root / "model") == ["000001-full"]
        opening.join()


@pytest.mark.parametrize(
    "error", [SnapshotError("no space left"), ShardUnavailable("shard 0: WriteSave: gone", shard=0, endpoint="")]
)
def test_failed_background_save_is_logged_and_the_next_works(
    root: Path, gate: Gate, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    gate.error = error
    gate.open()
    with job() as trained:
        trained.train(1)
        fleet_sparse.save("model", wait=False)
        saved()
        (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert record.getMessage().startswith(f"save('model'): failed: {error}. ")
        gate.error = None
        fleet_sparse.save("model")
    assert [name for name in names(root / "model") if name.endswith("full")] != []


# fleet_sparse.save_every


def test_save_every_saves_at_its_steps_and_keeps_the_last(root: Path) -> None:
    with job() as trained:
        fleet_sparse.save_every("model", steps=2, keep_last=1, deltas=1)
        for number in range(9):
            trained.train(1, first=number)
            saved()
    assert names(root / "model") == ["000003-full", "000004-delta"]
    assert [manifest(root / "model" / name)["workers"][0]["step"] for name in names(root / "model")] == [6, 8]


def test_an_evaluation_is_no_step(root: Path) -> None:
    with job() as trained:
        fleet_sparse.save_every("model", steps=1)
        trained.evaluate()
        assert names(root) == []


def test_save_due_during_another_save_follows_it(root: Path, gate: Gate) -> None:
    with job() as trained:
        fleet_sparse.save_every("model", steps=1, keep_last=None)
        trained.train(1)
        assert gate.reached.wait(JOIN_S)
        trained.train(3)
        gate.open()
        saved()
        assert names(root / "model") == ["000001-full"]
        trained.train(1)
        saved()
    assert [manifest(root / "model" / name)["workers"][0]["step"] for name in names(root / "model")] == [1, 5]


def test_second_save_every_replaces_the_first(root: Path) -> None:
    with job() as trained:
        fleet_sparse.save_every("one", steps=1)
        fleet_sparse.save_every("other", steps=1)
        trained.train(1)
        saved()
    assert names(root) == ["other"]


def test_schedule_lasts_from_before_init_worker_to_stop_worker(root: Path) -> None:
    paddle.enable_static()
    fleet_sparse.install()
    fleet_sparse.save_every("model", steps=1)
    with job() as trained:
        trained.train(1)
        saved()
        assert names(root / "model") == ["000001-full"]
        fleet.stop_worker()
        assert active().snapshots.queue.schedule is None


def test_a_save_that_fails_does_not_end_training(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with job() as trained:
        fleet_sparse.save_every("/outside", steps=2)
        trained.train(5)
        assert len([record for record in caplog.records if "failed: " in record.getMessage()]) == 2


@pytest.mark.parametrize("dirname", ["", "../outside", "a/../../b", "a\0b"])
def test_directory_outside_of_any_root_is_refused_at_once(dirname: str) -> None:
    with job():
        fleet_sparse.save_every("model", steps=1)
        with pytest.raises(SnapshotError):
            fleet_sparse.save_every(dirname, steps=1)
        assert active().snapshots.keep_last_of("model") == 3  # as before


# Resuming


PLACES = {
    "plain": fleet_sparse.resumable,
    "around look_ahead": lambda loader: fleet_sparse.resumable(fleet_sparse.look_ahead(loader)),
}


class Feeds:
    """An epoch of 7 feeds, which differ from epoch to epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in range(7):
            yield feed_of(100 * self.epoch + batch)


def epochs(trained: Job, wrap: Callable[[Any], Any], save_at: int | None = None) -> list[str]:
    """Returns the losses of three epochs, or up to a save."""
    feeds, losses = Feeds(), []
    resumable = wrap(feeds)
    loader: Iterable[Any] = resumable
    if isinstance(resumable, tuple):
        resumable, loader = resumable
    for epoch in range(resumable.epoch, 3):
        feeds.epoch = epoch
        for feed in loader:
            losses.append(trained.step(feed))
            if len(losses) == save_at:
                fleet_sparse.save("model")
                return losses
    return losses


def inside_look_ahead(loader: Any) -> tuple[Any, Any]:
    resumable = fleet_sparse.resumable(loader)
    return resumable, fleet_sparse.look_ahead(resumable)


@pytest.mark.parametrize("wrap", [*PLACES.values(), inside_look_ahead], ids=[*PLACES, "inside look_ahead"])
@pytest.mark.parametrize("save_at", [3, 7, 12])
def test_resumed_job_trains_the_remaining_batches_bit_by_bit(wrap: Callable[[Any], Any], save_at: int) -> None:
    with job() as trained:
        assert fleet_sparse.resume_step() == 0
        whole = epochs(trained, wrap)
    assert len(whole) == 21
    with job() as trained:
        assert epochs(trained, wrap, save_at) == whole[:save_at]
    with job("model") as trained:
        assert fleet_sparse.resume_step() == save_at
        assert epochs(trained, wrap) == whole[save_at:]


def resumed_epochs(trained: Job, save_at: int | None = None) -> tuple[int, list[str]]:
    step = fleet_sparse.resume("model")
    return step, epochs(trained, fleet_sparse.resumable, save_at)


@pytest.mark.parametrize("save_at", [3, 12])
def test_resume_takes_the_newest_snapshot_if_there_is_one(save_at: int) -> None:
    with job() as trained:
        step, whole = resumed_epochs(trained)
        assert (step, len(whole)) == (0, 21)
    with job() as trained:
        assert resumed_epochs(trained) == (0, whole)  # from the beginning, which the first run saved
    with job() as trained:
        assert resumed_epochs(trained, save_at) == (0, whole[:save_at])
    with job() as trained:
        assert resumed_epochs(trained) == (save_at, whole[save_at:])


def test_resume_after_a_step_is_refused() -> None:
    with job() as trained:
        trained.train(1)
        with pytest.raises(PlanError, match=r"init_worker\(\)"):
            fleet_sparse.resume("model")


def test_after_stop_worker_another_loader_may_be_resumable() -> None:
    with job():
        fleet_sparse.resumable([])
        fleet.stop_worker()
        fleet_sparse.resumable([])


# Paddle's calls


@pytest.mark.parametrize(("mode", "name"), [(0, "000002-full"), (1, "000002-delta"), (3, "000002-full")])
def test_modes_of_save_persistables(root: Path, mode: int, name: str) -> None:
    with job() as trained:
        for mode_then in (0, mode):
            trained.train(1)
            fleet.save_persistables(trained.executor, "model", paddle.static.default_main_program(), mode=mode_then)
    assert names(root / "model")[-1] == name


def test_save_persistables_takes_a_clone_for_test(root: Path) -> None:
    with job() as trained:
        trained.train(1)
        fleet.save_persistables(trained.executor, "model", trained.test)
    assert names(root / "model") == ["000001-full"]


def test_save_persistables_of_another_program_is_refused(root: Path) -> None:
    with job() as trained:
        for program in (paddle.static.Program(), "main"):
            with pytest.raises(PlanError, match="main_program"):
                fleet.save_persistables(trained.executor, "model", program)
    assert names(root) == []


@pytest.mark.parametrize("has_table", [True, False])
def test_save_persistables_of_one_of_two_programs_is_refused(root: Path, has_table: bool) -> None:
    with job() as trained:
        with paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()):
            ids = ids_input((-1, 2), "item")
            rows = flagged(ids, "other" if has_table else "items", None)
            logit = rows if has_table else linear(rows, "own")
            optimizer = fleet.distributed_optimizer(paddle.optimizer.Adam(0.05), strategy_of("sync"))
            optimizer.minimize(paddle.mean(logit))
        other = "other" if has_table else "own"
        with pytest.raises(PlanError, match=f"save_persistables: '{other}'"):
            fleet.save_persistables(trained.executor, "model", paddle.static.default_main_program())
    assert names(root) == []


@pytest.mark.parametrize("mode", [1, 2, 4, "0"])
def test_other_modes_are_refused(mode: Any) -> None:
    with job() as trained:
        if mode not in (1, 2):
            with pytest.raises(PlanError, match=f"save_persistables: mode {mode!r}.*mode=0"):
                fleet.save_persistables(trained.executor, "model", mode=mode)
        for call, name in (
            (lambda: fleet.load_model("model", mode), "load_model"),
            (lambda: fleet.load_one_table(0, "model", mode), "load_one_table"),
            (lambda: fleet.save_one_table(0, "model", mode), "save_one_table"),
        ):
            with pytest.raises(PlanError, match=f"{name}: mode {mode!r}.*mode=0"):
                call()


@pytest.mark.parametrize("kind", ["sync", "async", "geo"])
def test_loaded_model_trains_on_as_when_it_was_saved(kind: str) -> None:
    with job(kind=kind, optimizer=paddle.optimizer.SGD if kind == "geo" else paddle.optimizer.Adam) as trained:
        trained.train(5)
        fleet.save_persistables(trained.executor, "model")
        evaluated, after = trained.evaluate(), trained.train(4, first=5)
        fleet.load_model("model", 0)
        assert trained.evaluate() == evaluated
        assert trained.train(4, first=5) == after


def test_load_drops_early_pulled_rows() -> None:
    with job() as trained:
        trained.train(2)
        fleet.save_persistables(trained.executor, "model")
        plain = trained.train(2, first=2)
        feeds = iter(fleet_sparse.look_ahead([feed_of(9), feed_of(2), feed_of(3)]))
        trained.step(next(feeds))
        fleet.load_model("model", 0)
        assert [trained.step(feed) for feed in feeds] == plain


def test_one_table_is_saved_and_loaded_by_number_or_name(root: Path) -> None:
    with job() as trained:
        trained.train(3)
        fleet.save_one_table(0, "one", 0)
        fleet.save_one_table("items", "one", 0)
        before, dense = rows_of("items"), weight().tolist()
        trained.train(3)
        others = rows_of("users")
        fleet.load_one_table("items", "one", 0)
        assert rows_of("items") == before
        assert rows_of("users") == others
        assert weight().tolist() != dense
    assert names(root / "one") == ["000001-full", "000002-full"]
    saved_tables = manifest(root / "one" / "000001-full")
    assert (saved_tables["tables"], saved_tables["is_whole"]) == (["items"], False)


def rows_of(table: str) -> list[float]:
    session = active()
    spec = session.catalog.tables[table]
    connection = session.connection("test")
    unique, (inverse,) = connection.deduplicator.unique([np.arange(20)], table_salt(table))
    out = np.empty((len(unique.ids), DIM), np.float32)
    connection.training.pull([RowBatch(spec, unique, out)])
    values: list[float] = out[inverse].reshape(-1).tolist()
    return values


@pytest.mark.parametrize("table", [2, -1, "nobody", True])
def test_unknown_table_is_refused_with_the_known_ones(table: Any) -> None:
    with job():
        for call in (fleet.save_one_table, fleet.load_one_table):
            with pytest.raises(PlanError, match=rf"table {table!r}: .*0 'items', 1 'users'"):
                call(table, "model", 0)


def test_a_load_of_nothing_changes_nothing() -> None:
    with job() as trained:
        trained.train(2)
        evaluated = trained.evaluate()
        with pytest.raises(SnapshotError, match="nowhere"):
            fleet.load_model("nowhere", 0)
        assert trained.evaluate() == evaluated


def test_load_that_cannot_be_finished_is_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    stock = SnapshotRpcs.finish_load

    def finish_load(control: SnapshotRpcs, load_id: str, *, keep: bool, resumes: bool = False) -> None:
        asked.append(keep)
        if keep:
            raise SnapshotError("load: a snapshot is being written")
        stock(control, load_id, keep=keep)

    with job() as trained:
        trained.train(1)
        fleet_sparse.save("model")
        monkeypatch.setattr(SnapshotRpcs, "finish_load", finish_load)
        with pytest.raises(SnapshotError):
            fleet.load_model("model", 0)
    assert asked == [True, False]


def test_rows_that_no_push_touched_for_days_are_removed() -> None:
    with job() as trained:
        trained.step({"item": np.array([[1, 2]]), "user": np.array([[1, 1]])})
        for _ in range(3):
            fleet.save_persistables(trained.executor, "model", mode=3)
            trained.step({"item": np.array([[7, 8]]), "user": np.array([[2, 3]])})
        assert num_rows() == 4 + 3
        fleet.shrink()
        assert num_rows() == 4 + 3
        fleet.shrink(2)
        assert num_rows() == 2 + 2


def num_rows() -> int:
    return sum(pserver["rows"] for pserver in fleet_sparse.stats()["pservers"])


def test_error_on_worker_0_does_not_block_the_other_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    met = []
    stock = ControlClient.barrier

    def fails(control: SnapshotRpcs, criteria: Any, **options: Any) -> Any:
        raise MemoryError

    def barrier(control: ControlClient, name: str, **more: bool) -> Any:
        met.append(name)
        return stock(control, name, **more)

    with job():
        monkeypatch.setattr(SnapshotRpcs, "shrink", fails)
        monkeypatch.setattr(ControlClient, "barrier", barrier)
        with pytest.raises(MemoryError):
            fleet.shrink()
    assert met == ["shrink", "shrink ends"]


def test_a_dry_run_reports_the_rows_that_shrink_then_removes() -> None:
    with job() as trained:
        trained.step({"item": np.array([[1, 2]]), "user": np.array([[1, 1]])})
        before = num_rows()
        planned = fleet_sparse.shrink(min_norm=1e6, tables=["items"], dry_run=True)
        assert num_rows() == before
        (items,) = planned
        assert (items.table, items.criterion, items.num_removed) == ("items", "norm below 1e+06", 2)
        assert sorted(items.examples) == [1, 2]
        assert fleet_sparse.shrink(min_norm=1e6, tables=["items"]) == planned
        assert num_rows() == before - 2


@pytest.mark.parametrize("options", [{"min_score": -1}, {"min_norm": math.nan}, {"min_norm": 1, "decay": 0}])
def test_shrink_with_a_number_out_of_range_is_refused(options: Any) -> None:
    with job(), pytest.raises(ValueError, match=r"shrink: (min_score|min_norm|decay)"):
        fleet_sparse.shrink(**options)


def test_shrink_of_an_unknown_table_is_refused() -> None:
    with job(), pytest.raises(SnapshotError, match="'none'"):
        fleet_sparse.shrink(3, tables=["none"])


@pytest.mark.parametrize("threshold", [-1, 65536, 1.5, "3", True])
def test_shrink_threshold_out_of_range_is_refused(threshold: Any) -> None:
    with job(), pytest.raises(ValueError, match=rf"shrink: threshold is {threshold!r}"):
        fleet.shrink(threshold)
