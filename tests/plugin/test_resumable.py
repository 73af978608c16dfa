"""Positions of resumable loaders, with a fake session instead of pservers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

import fleet_sparse
from fleet_sparse.errors import FleetSparseError, PlanError
from fleet_sparse.plugin.resumable import Resumable
from fleet_sparse.plugin.session import Session
from fleet_sparse.settings import Settings
from fleet_sparse.worker.control.resumed import Position, Resumed

TEN = range(10)
NOTHING = Resumed()


class FakeSession(Session):
    """The session of one of two workers."""

    def __init__(self, resumed: Resumed = NOTHING) -> None:
        super().__init__(Settings())
        self._resumed_with = resumed

    @property
    def resumed(self) -> Resumed:
        return self._resumed_with

    @property
    def num_workers(self) -> int:
        return 2


def stands(epoch: int, batch: int) -> Resumed:
    return Resumed("000002-full", 5, Position(epoch, batch), 2)


def trained(loader: Resumable, num_steps: int | None = None) -> list[Any]:
    """Returns the batches of a pass, each followed by a step; leaves it after `num_steps`."""
    batches = []
    for batch in loader:
        batches.append(batch)
        loader.position_after_step()
        if len(batches) == num_steps:
            break
    return batches


def test_without_a_snapshot_all_batches_are_yielded() -> None:
    loader = Resumable(TEN, FakeSession())
    assert (loader.epoch, list(loader), len(loader)) == (0, list(TEN), 10)


def test_first_pass_begins_after_the_trained_batches() -> None:
    loader = Resumable(TEN, FakeSession(stands(3, 7)))
    assert (loader.epoch, trained(loader)) == (3, [7, 8, 9])
    assert (loader.epoch, trained(loader)) == (4, list(TEN))


def test_an_epoch_of_which_all_batches_are_done_has_none_left() -> None:
    loader = Resumable(TEN, FakeSession(stands(3, 10)))
    assert (trained(loader), loader.epoch) == ([], 4)


def test_a_batch_is_done_when_a_step_ran_since_it_was_yielded() -> None:
    loader = Resumable(TEN, FakeSession())
    positions = []
    for batch in loader:
        if batch % 3 == 0:
            positions.append(loader.position_after_step())
    assert positions == [Position(0, 1), Position(0, 4), Position(0, 7), Position(0, 10)]


def test_positions_count_from_the_beginning_of_the_epoch() -> None:
    loader = Resumable(TEN, FakeSession(stands(3, 7)))
    positions = [loader.position_after_step() for _ in loader]
    assert positions == [Position(3, 8), Position(3, 9), Position(3, 10)]


def test_several_steps_on_one_batch_are_one_batch() -> None:
    loader = Resumable(TEN, FakeSession())
    next(iter(loader))
    assert [loader.position_after_step() for _ in range(3)] == [Position(0, 1)] * 3


def test_a_step_without_a_batch_leaves_it_where_it_is() -> None:
    loader = Resumable(TEN, FakeSession(stands(3, 7)))
    assert loader.position_after_step() == Position(3, 7)
    trained(loader)
    assert loader.position_after_step() == Position(4, 0)


def test_a_pass_that_is_left_early_counts_as_an_epoch() -> None:
    loader = Resumable(TEN, FakeSession())
    assert trained(loader, 4) == [0, 1, 2, 3]
    assert loader.epoch == 0
    assert trained(loader) == list(TEN)
    assert loader.epoch == 2


def test_reading_the_first_batch_skips_nothing() -> None:
    loader = Resumable(TEN, FakeSession(stands(3, 7)))
    assert [next(iter(loader)) for _ in range(3)] == [7, 7, 7]
    assert trained(loader) == [7, 8, 9]


def test_the_epoch_is_that_of_the_pass_under_way() -> None:
    loader = Resumable(TEN, FakeSession(stands(3, 7)))
    assert [loader.epoch for _ in loader] == [3, 3, 3]


class Skipping:
    """A loader that skips batches without reading them."""

    def __init__(self) -> None:
        self.num_read = 0

    def __iter__(self) -> Iterator[int]:
        return self._from(0)

    def skip(self, num_batches: int) -> Iterable[int]:
        return self._from(num_batches)

    def _from(self, first: int) -> Iterator[int]:
        for batch in range(first, 10):
            self.num_read += 1
            yield batch


def test_a_loader_that_can_skip_does_not_read_what_is_done() -> None:
    skipping = Skipping()
    assert trained(Resumable(skipping, FakeSession(stands(0, 7)))) == [7, 8, 9]
    assert skipping.num_read == 3


def test_other_loaders_are_read_and_their_batches_thrown_away() -> None:
    read = []

    def batches() -> Iterator[int]:
        for batch in TEN:
            read.append(batch)
            yield batch

    loader = Resumable(batches(), FakeSession(stands(0, 7)))
    assert next(iter(loader)) == 7
    assert read == list(range(8))


def test_a_loader_without_a_length_has_none() -> None:
    with pytest.raises(TypeError):
        len(Resumable(iter(TEN), FakeSession()))  # type: ignore[arg-type]  # as users do


def test_another_number_of_workers_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    loader = Resumable(TEN, FakeSession(Resumed("000002-full", 5, Position(3, 0), 4)))
    assert (loader.epoch, trained(loader), trained(loader)) == (3, list(TEN), list(TEN))
    (warning,) = caplog.records
    assert warning.args == ("000002-full", 4, 2, 3)


def test_snapshot_without_a_position_warns(caplog: pytest.LogCaptureFixture) -> None:
    loader = Resumable(TEN, FakeSession(Resumed("000002-full", 5, None, 2)))
    assert (loader.epoch, trained(loader)) == (0, list(TEN))
    (warning,) = caplog.records
    assert warning.args == ("000002-full",)


def test_snapshot_without_workers_warns_of_the_position_only(caplog: pytest.LogCaptureFixture) -> None:
    loader = Resumable(TEN, FakeSession(Resumed("000001-full", 0, None, 0)))
    assert (loader.epoch, trained(loader)) == (0, list(TEN))
    (warning,) = caplog.records
    assert warning.args == ("000001-full",)


def test_second_resumable_loader_is_refused() -> None:
    session = FakeSession()
    Resumable(TEN, session)
    with pytest.raises(PlanError):
        Resumable(TEN, session)


@pytest.mark.usefixtures("plugin")
def test_reading_before_init_worker_is_refused() -> None:
    loader = fleet_sparse.resumable(cast(Iterable[Any], TEN))
    for read in (lambda: loader.epoch, lambda: iter(loader)):
        with pytest.raises(FleetSparseError, match=r"fleet\.init_worker\(\)"):
            read()


def test_position_of_threads_is_the_first_batch_that_is_not_done() -> None:
    loader = Resumable(TEN, FakeSession(stands(3, 2)))
    batches = loader.read_from(lambda num_skipped: iter(TEN[num_skipped:]))
    with ThreadPoolExecutor(1) as other:
        assert [next(batches), other.submit(next, batches).result()] == [2, 3]
        assert loader.position_after_step() == Position(3, 3)  # batch 3 runs on the other thread
        assert other.submit(loader.position_after_step).result() == Position(3, 2)
        assert [next(batches), next(batches)] == [4, 5]
        assert loader.position_after_step() == Position(3, 3)
        other.submit(loader.note_done).result()  # it waits for its next batch
        assert loader.position_after_step() == Position(3, 6)
        assert other.submit(lambda: [*batches]).result() == [6, 7, 8, 9]
        other.submit(loader.note_done).result()
    assert loader.epoch == 4
    loader.note_done()
    assert loader.position_after_step() == Position(4, 0)
