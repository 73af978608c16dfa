"""A Predictor over replicas that die, series that go on, and inputs that are wrong; every answer is checked by bits."""

from __future__ import annotations

import shutil
import threading
import time
from contextlib import ExitStack
from dataclasses import replace

import msgspec
import numpy as np
import paddle
import paddle.distributed.fleet as fleet
import pytest

from fleet_sparse.errors import ErrorCode, PlanError, ProtocolError, SettingError
from fleet_sparse.local_pservers import local_pservers
from fleet_sparse.serving import Predictor
from fleet_sparse.serving.model import read_model
from fleet_sparse.serving.pserver_reader import PserverReader
from fleet_sparse.serving.self_check import TOLERANCE, difference_of
from fleet_sparse.serving.series_reader import SeriesReader
from fleet_sparse.settings import Settings
from fleet_sparse.snapshot.directory import directory_at
from support.onnx_extra import needs_onnx
from support.programs import flagged, ids_input, linear, minimize, start
from support.serving import Load, PublishedModel, bits_of, endpoints_of, read_only_sets
from support.snapshots import Model, TableModel, save

IDS = [-(2**63), -1, 0, 2**63 - 1, *range(1, 197)]
UNSEEN = np.array([[1000, 1001, 1002]])


@pytest.fixture
def published(plugin, unchecked, tmp_path, monkeypatch):
    """A model with two tables, trained in this process and saved in `serve`."""
    monkeypatch.chdir(tmp_path)
    fleet.init()
    a, b = ids_input((-1, 3), "a"), ids_input((-1, 3), "b")
    pooled = paddle.sum(flagged(a, value=None, padding_idx=7), axis=1) + paddle.sum(flagged(b, "other", 0.25), axis=1)
    prediction = linear(paddle.nn.functional.silu(pooled))
    minimize(paddle.mean(paddle.square(prediction - 1.0)), paddle.optimizer.SGD(1e-3))
    executor = start()
    rng = np.random.default_rng(3)
    executor.run(feed={name: rng.choice(IDS, (50, 3)) for name in "ab"}, fetch_list=[])
    fleet.save_inference_model(executor, "serve", ["a", "b"], [prediction])
    feeds = [{name: rng.choice(IDS, (size, 3)) for name in "ab"} for size in (1, 2, 7, 32)]
    yield PublishedModel(tmp_path / "serve", IDS, feeds)
    fleet.stop_worker()


def settings_of(**changes) -> Settings:
    return Settings(**{"deadline_s": 20.0, "connect_s": 60.0, "retry_s": 0.5, **changes})


def wait_for(predictor, version) -> None:
    until = time.monotonic() + 30
    while predictor.stats().version != version:
        assert time.monotonic() < until, predictor.stats()
        time.sleep(0.01)


def check(load: Load, published: PublishedModel) -> None:
    """Checks that no answer failed or was wrong, and that no thread saw an older version after a newer one."""
    assert load.errors == []
    assert load.wrong(published.truth) == []
    for answers in load.answers:
        numbers = [each.version.number for each in answers]
        assert numbers == sorted(numbers)
        assert len(numbers) > 10


def right(predictor, published: PublishedModel) -> bool:
    outputs, version = predictor.run(published.feeds[-1])
    return bits_of(outputs) == published.truth[version][-1]


def test_rows_inside_the_process_follow_the_series(published):
    with Predictor(str(published.directory)) as predictor, Load(predictor, published.feeds, 1, 0.005) as load:
        for kind in ("delta", "full", "delta"):
            wait_for(predictor, published.publish(kind=kind))
            assert right(predictor, published)
        newest = published.newest
        wider = [TableModel(replace(spec, dim=9), {}) for spec in published.tables]
        bad = save(published.rows, Model(tuple(wider)), 1)
        while not predictor.stats().num_failed:
            time.sleep(0.01)
        stats = predictor.stats()
        assert (stats.version, stats.leading.number) == (newest, newest.number + 1)
        assert "dim " in stats.last_failure
        assert " and 9" in stats.last_failure
        assert stats.lag_s > 0
        shutil.rmtree(published.rows / bad)
        while predictor.stats().last_failure:
            time.sleep(0.01)
        stats = predictor.stats()
        assert (stats.version, stats.leading, stats.lag_s) == (newest, newest, 0.0)
        wait_for(predictor, published.publish(kind="full"))
        stats = predictor.stats()
        assert (stats.num_adopted, stats.last_failure, stats.lag_s) == (5, "", 0.0)
    check(load, published)


def test_removing_the_newest_snapshot_is_a_way_back(published, caplog):
    first = published.newest
    second = published.publish()
    caplog.clear()  # publishing predicts, too
    with caplog.at_level("INFO"), Predictor(str(published.directory)) as predictor:
        assert predictor.stats().version == second
        shutil.rmtree(published.rows / f"{second.number:06}-delta")
        wait_for(predictor, first)
        assert right(predictor, published)
    assert [each for each in caplog.messages if each.startswith("predicts with")] == [
        f"predicts with snapshot {second.number} ({second.checksum:016x})",
        f"predicts with snapshot {first.number} ({first.checksum:016x}) in place of {second.number}",
    ]


def test_a_killed_replica_costs_no_answer(published):
    with ExitStack() as stack:
        sets = read_only_sets(stack, published.directory.parent, 2, 2)
        predictor = stack.enter_context(
            Predictor(str(published.directory), endpoints_of(sets), cache_rows=64, settings=settings_of())
        )
        with Load(predictor, published.feeds) as load:
            time.sleep(0.5)
            sets[0].processes[1].kill()
            time.sleep(1.0)
        check(load, published)
        assert load.longest_gap_s() < 1.0
        assert len(predictor.stats().problems) == 1
        sets[0].processes[1].restart("--read-only", "--load", "serve/rows")
        while predictor.stats().problems:
            time.sleep(0.01)
        assert right(predictor, published)


def test_a_snapshot_that_pservers_refuse_is_named(published):
    with ExitStack() as stack:
        (pservers,) = read_only_sets(stack, published.directory.parent, 2, 1)
        predictor = stack.enter_context(Predictor(str(published.directory), pservers.endpoints))
        served = predictor.stats().version
        wider = [TableModel(replace(spec, dim=9), {}) for spec in published.tables]
        bad = save(published.rows, Model(tuple(wider)), 1)
        while len(problems := predictor.stats().problems) < 2:
            time.sleep(0.01)
        for endpoint in pservers.endpoints:
            (text,) = [each for each in problems if each.startswith(endpoint)]
            assert [fact for fact in ("'emb'", "dim ", " and 9") if fact not in text] == []
        assert predictor.stats().version == served
        assert right(predictor, published)
        shutil.rmtree(published.rows / bad)
        wait_for(predictor, published.publish(kind="full"))
        while predictor.stats().problems:
            time.sleep(0.01)
        assert right(predictor, published)


def test_no_replica_of_a_shard_is_an_error_with_its_index(published):
    with ExitStack() as stack:
        (pservers,) = read_only_sets(stack, published.directory.parent, 2, 1)
        predictor = stack.enter_context(
            Predictor(str(published.directory), pservers.endpoints, settings=settings_of(deadline_s=0.5))
        )
        for end in (pservers.processes[1].suspend, pservers.processes[1].kill):
            end()
            with Load(predictor, published.feeds, 4) as load:
                time.sleep(2)
            assert load.answers == [[]] * 4
            assert {(error.shard, error.endpoint) for error in load.errors} == {(1, pservers.endpoints[1])}
            assert len(load.errors) >= 8
        pservers.processes[1].restart("--read-only", "--load", "serve/rows")
        while predictor.stats().problems:
            time.sleep(0.01)
        assert right(predictor, published)


def test_the_cache_keeps_rows_that_a_delta_leaves(published):
    with ExitStack() as stack:
        sets = read_only_sets(stack, published.directory.parent, 2, 1)
        predictor = stack.enter_context(Predictor(str(published.directory), sets[0].endpoints, cache_rows=10_000))
        assert right(predictor, published)
        num_misses = predictor.stats().num_misses
        assert right(predictor, published)
        assert (predictor.stats().num_misses, predictor.stats().num_hits) == (num_misses, num_misses)
        wait_for(predictor, published.publish(share=0.1))
        assert right(predictor, published)
        assert num_misses < predictor.stats().num_misses < 1.5 * num_misses
        wait_for(predictor, published.publish(share=0.0))
        num_misses = predictor.stats().num_misses
        assert right(predictor, published)
        assert predictor.stats().num_misses == num_misses


@pytest.mark.parametrize("unseen", ["initial", "mean", "zeros"])
def test_ids_without_a_row_read_what_was_asked_for(published, unseen):
    """The first rows of `emb` are uniform around 0, those of `other` are 0.25."""
    published.publish(kind="full")
    feed = {"a": UNSEEN, "b": UNSEEN}
    with Predictor(str(published.directory)) as predictor:
        (initial,) = predictor.run(feed).outputs.values()
        (mean,) = predictor.run({"a": np.full((1, 3), 7), "b": UNSEEN}).outputs.values()  # 7 is padding: zeros
    expected = {"initial": initial.item(), "mean": mean.item(), "zeros": 0.0}
    assert len(set(expected.values())) == 3
    with Predictor(str(published.directory), unseen=unseen) as predictor:
        (found,) = predictor.run(feed).outputs.values()
        assert right(predictor, published)
    assert found.item() == expected[unseen]


class Refusing(SeriesReader):
    """Answers the reads of the first version only."""

    is_open = True

    def read(self, ids, arrays=(), **options):
        assert self.is_open, "nothing should be asked"
        return super().read(ids, arrays, **options)


class Gone(SeriesReader):
    """Has the first version no more, and notes until when dense values of the next one are waited for."""

    is_gone = False

    def read(self, ids, arrays=(), *, version=None, deadline=None):
        if arrays:
            self.deadline = deadline
        elif self.is_gone and version.number == 1:
            raise ProtocolError("version 1: gone", code=ErrorCode.VERSION_GONE)
        return super().read(ids, arrays, version=version, deadline=deadline)

    def await_version(self, known, timeout_s=20.0):
        time.sleep(0.01)
        return known

    def await_usable(self, known, deadline):
        return super().await_version(known, 20.0)


def test_a_request_that_adopts_a_version_keeps_its_deadline(published):
    reader = Gone(directory_at(str(published.rows)), ["emb", "other"])
    with Predictor(str(published.directory), reader, settings=settings_of(deadline_s=5.0)) as predictor:
        assert reader.deadline is None
        second, reader.is_gone, begun_at = published.publish(), True, time.monotonic()
        assert predictor.run(published.feeds[0]).version == second
        assert begun_at < reader.deadline <= time.monotonic() + 5.0
        assert predictor.stats().num_restarts == 1


@pytest.mark.parametrize(
    ("feed", "named"),
    [
        ({"a": UNSEEN}, "'b'"),
        ({"a": UNSEEN, "b": UNSEEN, "c": UNSEEN}, "'c'"),
        ({"a": UNSEEN.astype(float), "b": UNSEEN}, "float64"),
        ({"a": UNSEEN[:, :2], "b": UNSEEN}, r"\(1, 2\), should have \(-1, 3\)"),
        ({"a": UNSEEN[0], "b": UNSEEN}, r"\(3,\), should have \(-1, 3\)"),
        ({"a": UNSEEN.repeat(2, 0), "b": UNSEEN}, "a 2, b 1"),
        ({"a": UNSEEN, "b": UNSEEN + 1}, "'b': has id 1003, ids should be 0 to 1002"),
        ({"a": UNSEEN, "b": -UNSEEN}, "'b': has id -1000, ids should be 0 to 1002"),
    ],
)
def test_a_wrong_feed_is_named_before_anything_is_asked(published, feed, named):
    model = read_model(directory_at(str(published.directory)))
    first, second = model.lookups
    model = msgspec.structs.replace(model, lookups=(first, msgspec.structs.replace(second, size=1003)))
    (published.directory / "SERVING.json").write_bytes(model.to_json())
    reader = Refusing(directory_at(str(published.rows)), ["emb", "other"])
    with Predictor(str(published.directory), reader) as predictor:
        predictor.run({"a": UNSEEN, "b": UNSEEN})
        reader.is_open = False
        with pytest.raises(ValueError, match=named):
            predictor.run(feed)


def test_arguments_that_do_not_exist_are_refused(published):
    for wrong in ({"engine": "tensorrt"}, {"unseen": "random"}, {"cache_rows": -1}, {"pservers": "a:1,,b:2"}):
        with pytest.raises(SettingError):
            Predictor(str(published.directory), **wrong)
    with local_pservers(1, root=published.directory) as pservers, pytest.raises(PlanError):
        Predictor(str(published.directory), pservers.endpoints)


@needs_onnx
def test_onnxruntime_predicts_the_same_in_every_version(published):
    with (
        Predictor(str(published.directory)) as expected,
        Predictor(str(published.directory), engine="onnxruntime") as predictor,
    ):
        for _ in range(2):
            for feed in published.feeds:
                (found,) = predictor.run(feed).outputs.values()
                (wanted,) = expected.run(feed).outputs.values()
                assert difference_of(found, wanted) <= TOLERANCE
            version = published.publish()
            wait_for(predictor, version)
            wait_for(expected, version)


@needs_onnx
def test_onnxruntime_predicts_in_dynamic_mode_too(published):
    with Predictor(str(published.directory)) as predictor:
        (expected,) = predictor.run(published.feeds[-1]).outputs.values()
    paddle.disable_static()
    try:
        with Predictor(str(published.directory), engine="onnxruntime") as predictor:
            (found,) = predictor.run(published.feeds[-1]).outputs.values()
            wait_for(predictor, published.publish())
        assert paddle.in_dynamic_mode()
    finally:
        paddle.enable_static()
    assert difference_of(found, expected) <= TOLERANCE


class LosingChannel:
    """Loses requests and replies at random."""

    def __init__(self, channel, rng) -> None:
        self._channel, self._rng = channel, rng

    def __getattr__(self, name):
        return getattr(self._channel, name)

    def send(self, shard, parts):
        return self._rng.random() < 0.2 or self._channel.send(shard, parts)

    def receive(self, timeout_s):
        received = self._channel.receive(timeout_s)
        return None if self._rng.random() < 0.2 else received


def test_a_channel_that_loses_changes_no_answer(published, monkeypatch):
    from fleet_sparse.serving import pserver_reader

    rng = np.random.default_rng(5)
    settings = settings_of(read_try_s=0.02, retry_s=0.05)
    with ExitStack() as stack:
        sets = read_only_sets(stack, published.directory.parent, 2, 2)

        def opened(*arguments, **options):
            return LosingChannel(pserver_reader.open_channel(*arguments, **options), rng)

        reader = PserverReader(endpoints_of(sets), settings, open_channel=opened)
        predictor = stack.enter_context(Predictor(str(published.directory), reader, cache_rows=32))
        with Load(predictor, published.feeds) as load:
            for _ in range(3):
                wait_for(predictor, published.publish())
        check(load, published)
        assert predictor.stats().num_failovers > 0


class Unpinned(PserverReader):
    """Reads rows of the newest version, not of the one that is asked for."""

    def read(self, ids, arrays=(), *, version=None, deadline=None):
        return super().read(ids, arrays, version=version if arrays else None, deadline=deadline)


def test_without_pinned_versions_answers_are_mixed(published):
    with ExitStack() as stack:
        sets = read_only_sets(stack, published.directory.parent, 2, 1)
        reader = Unpinned(sets[0].endpoints, settings_of())
        predictor = stack.enter_context(Predictor(str(published.directory), reader))
        with Load(predictor, published.feeds) as load:
            for _ in range(20):
                published.publish()
                if load.wrong(dict(published.truth)):
                    break
        assert load.wrong(published.truth) != []


@pytest.mark.parametrize(
    ("cache_rows", "seconds"),
    [
        (64, 12),
        pytest.param(0, 12, marks=pytest.mark.slow),
        pytest.param(0, 60, marks=pytest.mark.slow),
        pytest.param(64, 60, marks=pytest.mark.slow),
    ],
)
def test_pservers_die_and_stop_while_versions_come(published, seconds, cache_rows):
    rng = np.random.default_rng(seconds + cache_rows)
    with ExitStack() as stack:
        sets = read_only_sets(stack, published.directory.parent, 2, 2)
        predictor = stack.enter_context(
            Predictor(str(published.directory), endpoints_of(sets), cache_rows, settings=settings_of())
        )
        ended = threading.Event()

        def harm() -> None:
            """Harms one pserver after the other, so that one of each shard lives."""
            while not ended.is_set():
                process = sets[int(rng.integers(2))].processes[int(rng.integers(2))]
                if rng.random() < 0.5:
                    process.suspend()
                    ended.wait(float(rng.uniform(0.2, 1.5)))
                    process.resume()
                else:
                    process.kill()
                    ended.wait(float(rng.uniform(0.0, 0.5)))
                    process.restart("--read-only", "--load", "serve/rows")
                ended.wait(0.3)

        with Load(predictor, published.feeds) as load:
            harming = threading.Thread(target=harm)
            harming.start()
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                begun_at = time.monotonic()
                published.publish()
                time.sleep(max(begun_at + 1 - time.monotonic(), 0.0))
            ended.set()
            harming.join()
            wait_for(predictor, published.newest)
            time.sleep(0.2)
        check(load, published)
        assert len({each.version for some in load.answers for each in some}) > seconds / 4
        assert predictor.stats().num_failed == 0
        assert load.longest_gap_s() < 2.0
