"""look_ahead in real processes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from support.jobs import numbers, outputs_of

SCRIPT = "look_ahead.py"
STEPS = (40, 28)


class Job(NamedTuple):
    """Losses of each worker, bit by bit, and the number of requests that all pservers received."""

    losses: list[list[str]]
    requests: list[int]


def trained(directory: Path, look_ahead: str) -> Job:
    """Two workers on two pservers."""
    directory.mkdir()
    variables = {"LOOK_AHEAD": look_ahead, "STEPS": ",".join(map(str, STEPS))}
    outputs = outputs_of(SCRIPT, directory, **variables)
    return Job(
        [re.findall(r"^loss (\S+)", output, re.MULTILINE) for output in outputs],
        [int(number) for output in outputs for number in numbers("requests", output)],
    )


@pytest.mark.guarantee("L1")
def test_looking_ahead_changes_no_loss_by_a_bit(tmp_path: Path) -> None:
    plain, ahead = trained(tmp_path / "plain", "0"), trained(tmp_path / "ahead", "1")
    assert ahead.losses == plain.losses
    assert [len(losses) for losses in plain.losses] == [2 * steps for steps in STEPS]
    assert all(len(set(losses)) == len(losses) for losses in plain.losses)
    # Early pulls and pulls of computed ids are separate requests.
    assert min(ahead.requests) > max(plain.requests)
