from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from fleet_sparse.pserver.engine.step_clock import StepClock


def clock_of(*steps: int, resting: tuple[int, ...] = ()) -> StepClock:
    """A clock whose workers pushed so many steps, and of which some rest."""
    clock = StepClock(len(steps))
    for worker, step in enumerate(steps):
        for _ in range(step):
            clock.push(worker)
    for worker in resting:
        clock.leave(worker)
    return clock


def test_no_step_is_complete_before_the_first() -> None:
    assert clock_of(0, 0, 0).complete == 0


def test_step_is_complete_when_the_slowest_worker_pushed_it() -> None:
    assert clock_of(3, 1, 2).complete == 1


def test_next_step_follows_the_one_that_was_pushed() -> None:
    assert [clock_of(3, 0).next_step(worker) for worker in (0, 1)] == [4, 1]


def test_resting_worker_is_not_waited_for() -> None:
    assert clock_of(3, 1, 2, resting=(1,)).complete == 2


def test_with_all_at_rest_every_step_that_was_pushed_is_complete() -> None:
    assert clock_of(3, 1, resting=(0, 1)).complete == 3


def test_workers_behind_a_step_are_those_that_work_and_have_not_pushed_it() -> None:
    assert clock_of(3, 1, 2, 1, resting=(1,)).behind(2) == {3}


def test_nobody_wakes_while_one_works() -> None:
    clock = clock_of(3, 1, resting=(1,))
    assert not clock.rejoin_all()
    assert clock.complete == 3
    assert clock.next_step(1) == 2


def test_all_wake_together_and_go_on_from_the_newest_step() -> None:
    clock = clock_of(3, 1, resting=(0, 1))
    assert clock.rejoin_all()
    assert [clock.next_step(worker) for worker in (0, 1)] == [4, 4]
    clock.push(0)
    assert clock.complete == 3


def test_who_woke_does_not_wake_again() -> None:
    clock = clock_of(1, 1, resting=(0, 1))
    assert [clock.rejoin_all(), clock.rejoin_all()] == [True, False]


@dataclass
class Model:
    """All that happened to each worker since all rested last, as a list."""

    num_workers: int
    since: int = 0  # the newest step when all woke
    pushes: dict[int, int] = field(default_factory=dict)
    at_rest: set[int] = field(default_factory=set)

    def step_of(self, worker: int) -> int:
        return self.since + self.pushes.get(worker, 0)

    @property
    def complete(self) -> int:
        steps = {worker: self.step_of(worker) for worker in range(self.num_workers)}
        working = [step for worker, step in steps.items() if worker not in self.at_rest]
        return min(working) if working else max(steps.values())

    def rest(self, worker: int) -> None:
        self.at_rest.add(worker)
        if len(self.at_rest) == self.num_workers:
            self.since, self.pushes, self.at_rest = self.complete, {}, set()


EVENTS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["push", "push", "push", "rest"])))


@given(st.integers(1, 4), EVENTS)
def test_clock_agrees_with_its_model_and_complete_never_falls(num_workers: int, events: list[tuple[int, str]]) -> None:
    clock, model = StepClock(num_workers), Model(num_workers)
    for number, event in events:
        worker, before = number % num_workers, clock.complete
        if event == "push" and worker not in model.at_rest:
            clock.push(worker)
            model.pushes[worker] = model.pushes.get(worker, 0) + 1
        elif event == "rest":
            clock.leave(worker)
            clock.rejoin_all()
            model.rest(worker)
        assert clock.complete == model.complete
        assert clock.complete >= before
        assert [clock.next_step(w) for w in range(num_workers)] == [model.step_of(w) + 1 for w in range(num_workers)]
