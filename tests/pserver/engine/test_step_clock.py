from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from fleet_sparse.pserver.engine.step_clock import StepClock


def test_workers_behind_a_step_have_not_left_or_pushed_it() -> None:
    clock = StepClock(4)
    for worker, step in enumerate((3, 1, 2, 1)):
        clock.push(worker, step)
    clock.leave(1)
    assert clock.behind(2) == {3}


@dataclass
class Model:
    """The pushes of each worker since all rejoined last."""

    num_workers: int
    since: int = 0  # the newest step when all rejoined
    pushes: dict[int, int] = field(default_factory=dict)
    outside: set[int] = field(default_factory=set)

    def step_of(self, worker: int) -> int:
        return self.since + self.pushes.get(worker, 0)

    @property
    def complete(self) -> int:
        steps = {worker: self.step_of(worker) for worker in range(self.num_workers)}
        working = [step for worker, step in steps.items() if worker not in self.outside]
        return min(working) if working else max(steps.values())

    def leave(self, worker: int) -> None:
        self.outside.add(worker)
        if len(self.outside) == self.num_workers:
            self.since, self.pushes, self.outside = self.complete, {}, set()


EVENTS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["push", "push", "push", "leave"])))


@given(st.integers(1, 4), EVENTS)
def test_clock_agrees_with_its_model_and_never_goes_back(num_workers: int, events: list[tuple[int, str]]) -> None:
    clock, model = StepClock(num_workers), Model(num_workers)
    for number, event in events:
        worker, before = number % num_workers, clock.complete
        if event == "push" and worker not in model.outside:
            clock.push(worker, clock.next_step(worker))
            model.pushes[worker] = model.pushes.get(worker, 0) + 1
        elif event == "leave":
            clock.leave(worker)
            if clock.have_all_left:
                clock.rejoin_all()
            model.leave(worker)
        assert clock.complete == model.complete
        assert clock.complete >= before
        assert [clock.next_step(w) for w in range(num_workers)] == [model.step_of(w) + 1 for w in range(num_workers)]
