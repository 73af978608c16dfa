from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fleet_sparse.pserver.lease.coordinator import Holder, holder_from, life_of

LIFE = life_of(os.getpid())
PLACE, _, PROCESS = LIFE.rpartition(" ")


def holder(life: str) -> Holder:
    return Holder(1, "a job", "host, pid 7", 10.0, life)


def test_a_process_that_lives_has_not_ended() -> None:
    assert not holder(LIFE).has_ended


def test_a_process_of_this_machine_that_is_gone_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        life = life_of(process.pid)
        assert not holder(life).has_ended
        process.kill()
    assert holder(life).has_ended


def test_a_process_whose_pid_another_one_has_now_has_ended() -> None:
    assert holder(f"{LIFE}0").has_ended


@pytest.mark.parametrize(
    "life", ["", f"another-boot/1 {PROCESS}", f"{PLACE}0 4000000000-1"], ids=["unknown", "boot", "namespace"]
)
def test_nothing_is_known_of_a_process_elsewhere(life: str) -> None:
    assert not holder(life).has_ended


def test_a_holder_of_a_former_version_has_no_life() -> None:
    content = b'{"generation": 1, "job": "a", "process": "host, pid 7", "ttl_s": 10.0}'
    assert holder_from(content, "here").life == ""
