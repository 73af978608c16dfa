"""Jobs of real processes that are killed and resume from their last snapshot."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from support.jobs import job, numbers, outputs_of, wait_for_line

SCRIPT = "resume.py"


def killed_behind(directory: Path, epochs: str, save_at: int) -> None:
    """Runs a job that is killed one step after its only snapshot."""
    with job(SCRIPT, directory, EPOCHS=epochs, SAVE_AT=str(save_at)) as (_, workers):
        wait_for_line(workers[0], "saved")


def losses(output: str) -> list[str]:
    return re.findall(r"^loss (\S+)", output, re.MULTILINE)


EPOCHS, SAVE_AT = "40,40", 50


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """Losses of each worker in an uninterrupted job."""
    return [losses(output) for output in outputs_of(SCRIPT, tmp_path_factory.mktemp("whole"), EPOCHS=EPOCHS)]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a job that saved after `SAVE_AT` steps and was killed."""
    directory = tmp_path_factory.mktemp("killed")
    killed_behind(directory, EPOCHS, SAVE_AT)
    return directory


def positions(directory: Path) -> list[int]:
    """Returns the steps of the workers in the only snapshot of a job."""
    (manifest,) = directory.glob("model/*/MANIFEST.json")
    return [each["step"] for each in json.loads(manifest.read_text())["workers"]]


@pytest.mark.guarantee("V4")
def test_killed_job_resumes_bit_by_bit(whole: list[list[str]], killed: Path) -> None:
    resumed = [losses(output) for output in outputs_of(SCRIPT, killed, EPOCHS=EPOCHS, load="model")]
    assert [len(of_worker) for of_worker in whole] == [120, 120]
    assert resumed == [of_worker[SAVE_AT:] for of_worker in whole]
    assert positions(killed) == [SAVE_AT, SAVE_AT]


@pytest.mark.slow
def test_job_with_unequal_batches_resumes_bit_by_bit(tmp_path: Path) -> None:
    whole = [losses(output) for output in outputs_of(SCRIPT, tmp_path, EPOCHS="7,4")]
    killed_behind(tmp_path, "7,4", save_at=6)
    resumed = [losses(output) for output in outputs_of(SCRIPT, tmp_path, EPOCHS="7,4", load="model")]
    assert [len(of_worker) for of_worker in whole] == [21, 12]
    assert resumed == [of_worker[done:] for of_worker, done in zip(whole, [6, 4], strict=True)]
    assert positions(tmp_path) == [6, 6]


@pytest.mark.slow
@pytest.mark.guarantee("V4")
def test_job_killed_at_any_time_resumes_from_its_last_snapshot(whole: list[list[str]], tmp_path: Path) -> None:
    with job(SCRIPT, tmp_path, EPOCHS=EPOCHS, SAVE_EVERY="3") as (_, workers):
        for _ in range(57):
            wait_for_line(workers[0], "loss")
    outputs = outputs_of(SCRIPT, tmp_path, EPOCHS=EPOCHS, load="model")
    (step,) = {int(number) for output in outputs for number in numbers("resumes at step", output)}
    assert 0 < step < 60
    assert [losses(output) for output in outputs] == [of_worker[step:] for of_worker in whole]
    assert len(list(tmp_path.glob("model/*/MANIFEST.json"))) in (1, 2)


def test_other_number_of_workers_restarts_the_epoch(killed: Path) -> None:
    (output,) = outputs_of(SCRIPT, killed, EPOCHS="40", load="model", num_workers=1, num_servers=1)
    assert "resumes at step 50 epoch 1" in output
    assert re.search(r"000\d+-\w+ .*2 workers.* 1\b", output)
    assert len(losses(output)) == 80
