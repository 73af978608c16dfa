from __future__ import annotations

import pytest

from fleet_sparse.launch import Launch

BY_HAND = Launch("", "host", "")
ONE = Launch("", "host", "/run/one")


@pytest.mark.parametrize(
    "other", [ONE, BY_HAND, Launch("", "another host", "/run/two"), Launch()], ids=["same", "by hand", "remote", "none"]
)
def test_processes_that_may_be_of_one_job_do_not_conflict(other: Launch) -> None:
    assert (ONE.conflict(other), other.conflict(ONE)) == ("", "")


def test_two_fleetruns_on_one_machine_conflict() -> None:
    assert ONE.conflict(ONE._replace(launcher="/run/two"))


@pytest.mark.parametrize("other", ["", "b"])
def test_other_job_ids_conflict_and_are_named(other: str) -> None:
    assert repr(other) in ONE._replace(job_id="a").conflict(ONE._replace(job_id=other))


def test_job_id_joins_two_fleetruns() -> None:
    assert ONE._replace(job_id="a").conflict(Launch("a", "host", "/run/two")) == ""


def test_processes_of_one_machine_and_fleetrun_have_one_launch() -> None:
    environment = {"PADDLE_GLOO_FS_PATH": "/run/one"}
    one, other = Launch.of_process("", environment), Launch.of_process("", environment)
    assert one == other
    assert one.conflict(Launch.of_process("", {"PADDLE_GLOO_FS_PATH": "/run/two"}))
