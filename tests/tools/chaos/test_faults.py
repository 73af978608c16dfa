"""The faults of a chaos run."""

from __future__ import annotations

from itertools import islice

import pytest

from fleet_sparse.tools.chaos.faults import FaultKind, faults
from fleet_sparse.tools.chaos.job import Counted, Death
from fleet_sparse.tools.chaos.run import discrepancy


def test_equal_seeds_give_equal_faults() -> None:
    first, second, other = (list(islice(faults(seed, tuple(FaultKind), 2), 100)) for seed in (3, 3, 4))
    assert first == second != other
    assert {fault.kind for fault in first} == set(FaultKind)
    assert {fault.target for fault in first} == {0, 1}


@pytest.mark.parametrize("seed", range(5))
def test_each_kind_comes_once_in_a_round(seed: int) -> None:
    kinds = [fault.kind for fault in islice(faults(seed, tuple(FaultKind), 2), 3 * len(FaultKind))]
    for begin in range(0, len(kinds), len(FaultKind)):
        assert set(kinds[begin : begin + len(FaultKind)]) == set(FaultKind)


def test_rounds_differ_in_their_order() -> None:
    kinds = [fault.kind for fault in islice(faults(0, tuple(FaultKind), 2), 2 * len(FaultKind))]
    assert kinds[: len(FaultKind)] != kinds[len(FaultKind) :]


def test_instants_last_no_time() -> None:
    instants = {FaultKind.kill, FaultKind.kill_all, FaultKind.connections, FaultKind.power, FaultKind.torn}
    for fault in islice(faults(0, tuple(FaultKind), 3), 200):
        assert (fault.lasts_s == 0) == (fault.kind in {*instants, FaultKind.worker})
        assert fault.quiet_s > 0


@pytest.mark.parametrize(
    ("mode", "counted", "word"),
    [
        ("async", Counted(100, 100, 100, 0), None),
        ("async", Counted(100, 97, 100, 3), None),
        ("geo", Counted(100, 94, 100, 3), None),
        ("async", Counted(100, 96, 100, 3), "lacks 4"),
        ("geo", Counted(100, 93, 100, 3), "lacks 7"),
        ("sync", Counted(100, 100, 102, 0), "2 updates twice"),
        ("async", Counted(100, 90, 101, 20), "1 updates twice"),
        ("async", Counted(100, 100, 100, 0, (Death(-4, 1), Death(-4, -4))), None),
        ("async", Counted(100, 99, 100, 0, (Death(-4, 1),)), "lacks 1"),
        ("async", Counted(100, 100, 101, 0, (Death(0, 0),)), "1 updates twice"),
        ("async", Counted(100, 100, 100, 0, (Death(0, 0), Death(-5, 0))), "death lost 5"),
        ("async", Counted(100, 100, 100, 0, (Death(0, 2),)), "death doubled 2"),
        ("geo", Counted(100, 100, 100, 0, (Death(-9, 1),)), None),
        ("geo", Counted(100, 100, 100, 0, (Death(-10, 0),)), "death lost 10"),
        ("async", Counted(100, 100, 100, 0, filled=(0, 1)), "filled once has 0"),
        ("async", Counted(100, 100, 100, 0, filled=(1, 2)), "filled once has 2"),
        ("async", Counted(100, 99, 100, 1, filled=(0, 1)), None),
    ],
)
def test_updates_that_are_lost_or_doubled_are_found(mode: str, counted: Counted, word: str | None) -> None:
    found = discrepancy(mode, "snapshot", 1, counted, seed=5)
    assert found is None if word is None else word in (found or "")


@pytest.mark.parametrize("durability", ["log", "sync"])
def test_a_log_loses_nothing_that_a_worker_may_report(durability: str) -> None:
    assert "3 pushes are lost" in (discrepancy("async", durability, 1, Counted(100, 97, 100, 3), seed=5) or "")
    assert discrepancy("async", durability, 1, Counted(100, 100, 100, 0), seed=5) is None
