"""Workers that cache rows: real pservers, real Paddle."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import numpy as np
import pytest

from fleet_sparse.core.initializer import constant
from fleet_sparse.core.table_spec import TableSpec
from support.jobs import TIMEOUT_S, job, numbers, outputs_of
from support.saves import saved_rows

COUNTER = TableSpec(name="counter", dim=2, rule="sgd", initializer=constant(0.0))


@pytest.mark.parametrize(
    ("mode", "look_ahead"),
    [
        ("sync", ""),
        ("async", "1"),
        *(pytest.param(*values, marks=pytest.mark.slow) for values in [("sync", "1"), ("async", ""), ("lag", "1")]),
    ],
)
@pytest.mark.guarantee("H7")
@pytest.mark.guarantee("H8")
def test_cached_rows_have_own_updates_and_at_a_barrier_all(tmp_path: Path, mode: str, look_ahead: str) -> None:
    outputs = outputs_of("cached.py", tmp_path, MODE=mode, LOOK_AHEAD=look_ahead)
    assert all("ended well" in output for output in outputs)
    check_saved(tmp_path)


@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.slow)])
def test_rows_are_cached_with_dense_values_on_other_pservers(tmp_path: Path, mode: str) -> None:
    shards = {"FLEET_SPARSE_ROW_SHARDS": "2"}
    outputs = outputs_of("cached.py", tmp_path, num_servers=3, of_pservers=shards, **shards, MODE=mode, LOGS="1")
    check_saved(tmp_path)
    for worker, output in enumerate(outputs):
        (line,) = [each for each in output.splitlines() if f"row cache of worker {worker}: " in each]
        figures = re.findall(r"-?[\d.]+", line.partition(f"of worker {worker}: ")[2])
        hits, refreshed, saved_mb, mb, _ = map(float, figures)
        assert 30 < hits < 100
        assert 0 <= refreshed <= 100
        assert abs(saved_mb) <= mb < 1
        assert line.endswith("in all")


def check_saved(directory: Path) -> None:
    """Checks that the snapshot has every update that the workers made."""
    made = np.stack([np.load(directory / f"made{worker}.npy") for worker in range(2)], axis=1)
    np.testing.assert_array_equal(saved_rows(directory / "model", COUNTER, np.arange(len(made))), made)


@pytest.mark.parametrize("clip", ["", "1"], ids=["whole", "clipped"])
@pytest.mark.guarantee("H3")
def test_copies_are_trained_by_the_mean_of_gradients(tmp_path: Path, clip: str) -> None:
    outputs = outputs_of("cached_own_rows.py", tmp_path, CLIP=clip)
    assert all("ended well" in output for output in outputs)


@pytest.mark.slow
@pytest.mark.guarantee("H9")
def test_a_killed_worker_loses_only_what_it_held(tmp_path: Path) -> None:
    with job("cached_dying.py", tmp_path) as (_, (survivor, killed)):
        output, _ = survivor.communicate(timeout=TIMEOUT_S)
        assert killed.wait(TIMEOUT_S) == -signal.SIGKILL
    assert (survivor.returncode, "ended well" in output) == (0, True), output


@pytest.mark.parametrize(
    ("what", "updates"),
    [("load", 2 * 5 + 2 * 2), ("shrink", 2 * 2)],
)
@pytest.mark.guarantee("H8")
@pytest.mark.guarantee("H11")
def test_shrink_and_load_empty_the_caches(tmp_path: Path, what: str, updates: float) -> None:
    """A load brings back what both workers made in 5 steps, a shrink removes all rows, and 2 steps come after it."""
    for output in outputs_of("cached_alone.py", tmp_path, WHAT=what):
        assert "cached 0\n" in output
        assert f"updates {{{float(updates)}}}" in output


@pytest.mark.guarantee("V3")
@pytest.mark.guarantee("H8")
def test_resumed_workers_train_the_batches_not_in_the_save(tmp_path: Path) -> None:
    """Each worker has 18 batches. Steps that only send held updates are not counted among them."""
    outputs_of("resume.py", tmp_path, EPOCHS="6,6", SAVE_EVERY="5", ROW_LAG="40")
    saved = sorted((tmp_path / "model").iterdir())
    outputs = outputs_of("resume.py", tmp_path, EPOCHS="6,6", ROW_LAG="40", load=str(saved[-1]))
    steps = {int(number) for output in outputs for number in numbers("resumes at step", output)}
    assert steps in ({5}, {10}, {15})
    assert [output.count("\nloss") for output in outputs] == [18 - steps.pop()] * 2


@pytest.mark.guarantee("H4")
def test_one_resumed_worker_is_as_without_a_cache_bit_by_bit(tmp_path: Path) -> None:
    without = losses_in(outputs_of("resume.py", tmp_path, num_workers=1, EPOCHS="6"))
    options = {"num_workers": 1, "EPOCHS": "6", "ROW_LAG": "40"}
    assert losses_in(outputs_of("resume.py", tmp_path, SAVE_EVERY="5", **options)) == without
    saved = str(max((tmp_path / "model").iterdir()))
    resumed = losses_in(outputs_of("resume.py", tmp_path, load=saved, **options))
    assert 0 < len(resumed) < len(without) == 18
    assert resumed == without[-len(resumed) :]


def losses_in(outputs: list[str]) -> list[str]:
    (output,) = outputs
    return re.findall(r"^loss (\S+)", output, re.MULTILINE)


@pytest.mark.guarantee("H6", "H7")
@pytest.mark.parametrize("dense", ["pservers", "all_reduce"])
def test_uneven_passes_with_cached_rows_train_each_batch_once(tmp_path: Path, endpoints: str, dense: str) -> None:
    outputs = outputs_of("cached_passes.py", tmp_path, SIZES="10,13", DENSE=dense, PADDLE_TRAINER_ENDPOINTS=endpoints)
    assert all("ended well" in output for output in outputs)


@pytest.mark.guarantee("H8", "V3")
@pytest.mark.parametrize("dense", ["pservers", "all_reduce"])
def test_scheduled_saves_have_what_was_held(tmp_path: Path, endpoints: str, dense: str) -> None:
    outputs_of(
        "cached_passes.py", tmp_path, SIZES="9,9", DENSE=dense, SAVE_EVERY="6", PADDLE_TRAINER_ENDPOINTS=endpoints
    )
    made = np.stack([np.load(tmp_path / f"made{worker}.npy") for worker in range(2)], axis=2)
    saves = sorted((tmp_path / "model").iterdir())
    assert saves
    for path in saves:
        (step,) = set(steps_in(path))
        assert step % 6 == 0
        np.testing.assert_array_equal(saved_rows(path, COUNTER, np.arange(made.shape[1])), made[step])


@pytest.mark.guarantee("H8")
@pytest.mark.parametrize("dense", ["pservers", "all_reduce"])
def test_saves_between_uneven_passes_have_what_was_held(tmp_path: Path, endpoints: str, dense: str) -> None:
    """Worker 0 waits at a barrier for the last three batches of each pass of the other one."""
    variables = {"SIZES": "10,13", "MEET": "1", "DENSE": dense, "SAVE_EVERY": "6"}
    outputs_of("cached_passes.py", tmp_path, PADDLE_TRAINER_ENDPOINTS=endpoints, **variables)
    made = [np.load(tmp_path / f"made{worker}.npy") for worker in range(2)]
    trained = [(10 * number + min(batch, 10), 13 * number + batch) for number in range(3) for batch in range(14)]
    cuts = []
    for path in sorted((tmp_path / "model").iterdir()):
        rows = saved_rows(path, COUNTER, np.arange(made[0].shape[1]))
        cuts += [cut for cut in trained if all(np.array_equal(rows[:, w], made[w][cut[w]]) for w in range(2))][:1]
    assert len(cuts) == len(list((tmp_path / "model").iterdir()))
    assert cuts[-1] > (10, 13)


@pytest.mark.guarantee("H6", "V3")
def test_a_worker_that_saves_alone_has_all_dense_updates(tmp_path: Path) -> None:
    """Its values are checked in each step. The other worker trains a sixth step while it sends."""
    outputs_of("cached_passes.py", tmp_path, SIZES="6,6", DENSE="pservers", SAVE_ALONE="5")
    (path,) = (tmp_path / "model").iterdir()
    assert steps_in(path) == [6, 6]


def steps_in(snapshot: Path) -> list[int]:
    """The numbers of steps of the workers in a snapshot."""
    return [each["step"] for each in json.loads((snapshot / "MANIFEST.json").read_text())["workers"]]
