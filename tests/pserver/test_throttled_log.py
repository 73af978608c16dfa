from __future__ import annotations

import logging

import pytest

from fleet_sparse.pserver.throttled_log import ThrottledLog


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.set_level(logging.WARNING)
    now = 0.0
    log = ThrottledLog(logging.getLogger("test"), lambda: now)
    for number in range(100):
        now = number / 10
        log.warning("frame %d refused", number)
    log.warning("another")
    return caplog.messages


def test_one_line_of_a_kind_is_logged_in_a_second(lines: list[str]) -> None:
    assert len(lines) == 10 + 1


def test_a_line_has_the_number_of_those_left_out(lines: list[str]) -> None:
    assert lines[:2] == ["frame 0 refused", "frame 10 refused (and 9 more)"]


def test_lines_of_another_kind_are_logged_at_once(lines: list[str]) -> None:
    assert lines[-1] == "another"
