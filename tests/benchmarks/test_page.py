"""What the blocks of the page say of hand-made runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import page
from benchmarks.contenders import AHEAD, FLOOR, OURS
from benchmarks.record import machine

STEP = {"mode": "async", "channel": "stream", "serial": False}
PARTS = {
    "the loader": 0.001,
    "Paddle, before the first op": 0.001,
    "rows pulled": 0.002,
    "forward and backward": 0.009,
    "gradients pushed, dense values exchanged": 0.003,
    "Paddle, after the last op": 0.002,
}
CYCLES = {"dedup": [0.0005], "pull": [0.001], "push": [0.001], "whole": [0.002], "combined": [0.001], "num_bytes": 8e5}
STRETCH = {
    "num_rows": 1_000_000,
    "rows_per_s": 8e6,
    "median_ms": 1.5,
    "worst_ms": 7.0,
    "bytes_a_row": 168.0,
    "most_bytes_a_row": 180.0,
}
SAVED = {
    "raw write and fsync": 2.0,
    "save": 3.0,
    "save during pushes": 4.0,
    "save, until pushes may go on": 0.01,
    "raw read": 1.0,
    "start, empty": 1.0,
    "start and load": 3.5,
    "the load of that, by difference": 2.5,
    "start and load, one more": 3.0,
    "start and load, two deltas": 4.0,
    "restart until it answers": 1.5,
    "save a delta of 1 %": 0.2,
    "bytes of a delta of 1 %": 13.6e6,
    "push, median ms": 1.0,
    "push, p99 ms": 2.0,
    "push during a save, median ms": 2.0,
    "push during a save, p99 ms": 5.0,
}
CHECK = {
    "name": "async, 1 x 1: rows",
    "measured_us": 100.0,
    "predicted_us": 110.0,
    "from_own_cpu_us": 120.0,
    "is_fitted": True,
    "rounds": 1,
    "others": 0.05,
}
KERNEL = {"kernel": "find", "dim": 16, "num_rows": 1_000_000, "batch": 13_000}
ROWS = {"rows": 10_000_000, "dim": 16, "rule": "adagrad", "pservers": 2}
PEER = {
    "servers": 2,
    "shards": 8,
    "save_s": 90.0,
    "start_with_load_s": 28.0,
    "load_model_s": 20.0,
    "save_bytes": 680e6,
    "rows": 10_000_000,
    "insert_s": 8.0,
}


def run(*rounds: Any, options: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A recorded run with these rounds."""
    begun = {"commit": "1234567", "is_dirty": False, "date": "2026-01-02T03:04:05+00:00", "machine": machine()}
    return {**begun, "options": options or {}, **more, "rounds": list(rounds)}


def job(examples_per_s: float, worker_ms: float, pservers_ms: float) -> dict[str, float]:
    """What a round of the cluster benchmark says of a job."""
    return {"examples_per_s": examples_per_s, "worker_ms": worker_ms, "pservers_ms": pservers_ms, "others": 0.0}


def steps(ours_s: float, **options: Any) -> dict[str, Any]:
    """A run of steps whose floor is 10 ms."""
    one = {OURS: {"seconds": [ours_s]}, FLOOR: {"seconds": [0.01]}}
    return run(one, options={**STEP, **options}, batch=512, num_ids=13_312, num_distinct=8123.4)


def parts(**options: Any) -> dict[str, Any]:
    """A run of the parts whose floor is 10 ms."""
    one = {
        OURS: {"seconds": [0.018], "parts": [PARTS]},
        AHEAD: {"seconds": [0.016], "parts": [{**PARTS, "rows pulled": 0.0}]},
        FLOOR: {"seconds": [0.01], "parts": []},
    }
    return run(one, options={**STEP, "model": "click", **options})


CONVERGED = {"plain": {"test_auc": 0.75, "examples_per_s": 1e4}, "sync": {"test_auc": 0.751, "examples_per_s": 2e4}}
JOBS = {"sync, 1 x 2": job(9000, 11, 2), "sync, 1 x plain": job(10_000, 10, 0), "sync, 2 x 2": job(9000, 11.5, 2.8)}
GROWTH = {"in process": {"backed_bytes_per_s": [0.5e9, 1.5e9], "stretches": [STRETCH], "curve": []}}
MADE: dict[str, tuple[str, dict[str, Any], str]] = {
    "start": ("start", run({"pserver": {"seconds": 1.25, "resident_bytes": 150e6}}), "| 150 (150 - 150) |"),
    "kernels": (
        "kernels",
        run({"a": {"limit": 6e-4, "ours": 1e-3, "NumPy": 4e-3}}, options={"rows": [1_000_000]}, cases={"a": KERNEL}),
        "| find |  | 0.60 (13.0) |",
    ),
    "client": (
        "client",
        run({"1, zmq": CYCLES}, options={"batch": 13_000}),
        "| 1, zmq | 500 | 1000 | 1000 | 2000 (2000 - 2000) | 6.50 | at least 6 | 5.20 | 1000 (1000 - 1000) | 13.00 |",
    ),
    "local": (
        "local",
        run({"sgd, dim 16": {"ours": [0.001], "NumPy": [0.003]}}),
        "| 1.00 (1.00 - 1.00) | 3.00 (3.00 - 3.00), 3.0 |",
    ),
    "lookup": ("lookup", steps(0.013), "async, stream: pservers | 13.00 (13.00 - 13.00) | 1.30 (1.30 - 1.30) |"),
    "step": ("step", steps(0.012), "async, stream: pservers | 12.00 (12.00 - 12.00) | 1.20 (1.20 - 1.20) | 42 667 |"),
    "parts": ("parts", parts(), "| rows pulled | 2.00 | 0.00 |  |"),
    "limits": ("parts", parts(), "| rows pulled | 20.0 | 0.0 |"),
    "took": ("step", run(seconds=120.0), "The newest runs took 2 minutes together: step 2.0."),
    "cluster": (
        "cluster",
        run({**JOBS, "sync, 2 x plain": job(18_000, 11, 0)}),
        "| sync, 1 x 2 | 9 000 | 0.90 | 11.0 (11.0 - 11.0) | 2.0 (2.0 - 2.0) | 1.30 | 0.0 |",
    ),
    "growth": (
        "growth",
        run(GROWTH),
        "| in process, 1 M | 8.0 (8.0 - 8.0) | 1.50 (1.50 - 1.50) | 7 | 168.0 (168.0 - 168.0) | 180.0 |",
    ),
    "snapshot": (
        "snapshot",
        run(SAVED, options=ROWS, num_bytes=1.36e9, peer=PEER),
        "| save, until it is committed | 3.00 (3.00 - 3.00) | 1.50 |",
    ),
    "dense": (
        "dense",
        run({"2, 100 kB, pserver": [0.002]}, options={"workers": [2], "kilobytes": [100.0]}),
        "| 2, 100 kB | 2.00 (2.00 - 2.00) |",
    ),
    "convergence-flights": (
        "convergence",
        run(CONVERGED, options={"data": ["flights"]}),
        "| sync | 0.7510 | +0.00100 | +0.00100 | 20 000 |",
    ),
    "convergence-synthetic": (
        "convergence",
        run(CONVERGED, options={"data": ["synthetic", "1000"]}),
        "| sync | 0.7510 | +0.00100 | +0.00100 | 20 000 |",
    ),
    "scale": (
        "scale",
        run({CHECK["name"]: {"step_s": 1e-4, "others": 0.05, "yardstick_s": 1e-3}}, yardstick_s=1e-3, checks=[CHECK]),
        "The model is within 20 % of 1 of the 1 fitted cases",
    ),
}
"""By block: the benchmark, a run of it, and what the block has to say."""


def text_of(block: str, results: Path, name: str, *runs: dict[str, Any]) -> str:
    """What a block says once these runs are recorded."""
    (results / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in runs))
    found = page.BLOCKS[block](results)
    assert found is not None
    return found.text


def test_every_block_is_tried() -> None:
    assert page.BLOCKS.keys() - MADE.keys() == {"figures"}, "tests/benchmarks/test_figures.py tries that one"


@pytest.mark.parametrize("block", MADE)
def test_a_block_says_what_its_run_measured(block: str, tmp_path: Path) -> None:
    name, recorded, expected = MADE[block]
    assert expected in text_of(block, tmp_path, name, recorded)


def test_what_paddle_takes_is_told_over_the_floor(tmp_path: Path) -> None:
    text = text_of("limits", tmp_path, "parts", parts())
    assert "| % of the floor's step | click model, async, stream | click model, async, stream, looking ahead |" in text
    assert "| Paddle, over the floor | 20.0 | 20.0 |" in text
    assert "| the step | 180.0 | 160.0 |" in text


def test_what_the_floor_makes_beside_the_peer_is_told(tmp_path: Path) -> None:
    of_round = {page.OURS: {"seconds": [3.0]}, page.FLOOR: {"seconds": [2.0]}, page.PADDLE: {"seconds": [2.5]}}
    run = {"options": {"mode": "async", "channel": "stream", "serial": False, "peer": True}, "rounds": [of_round]}
    for name in ("step", "lookup"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(run) + "\n")
    text = text_of("limits", tmp_path, "parts", parts())
    said = "1.25 in the click model, async, stream; 1.25 in the lookup model, async, stream."
    assert f"The floor over the peer, in examples a second: {said}" in " ".join(text.split())


def test_the_parts_and_the_floor_add_up_to_the_step(tmp_path: Path) -> None:
    lines = text_of("limits", tmp_path, "parts", parts()).strip().splitlines()[2:]
    *of_parts, step = (float(line.split(" | ")[1]) for line in lines)
    assert sum(of_parts) == pytest.approx(step)


def test_steps_with_a_bounded_lag_stand_beside_those_without(tmp_path: Path) -> None:
    text = text_of("step", tmp_path, "step", steps(0.012), steps(0.02), steps(0.015, max_step_lag=4))
    assert "| async, stream: pservers | 20.00 (20.00 - 20.00) | 2.00 (2.00 - 2.00) |" in text
    assert "| async, max_step_lag 4, stream: pservers | 15.00 (15.00 - 15.00) | 1.50 (1.50 - 1.50) |" in text


def test_a_second_run_in_the_same_way_counts_once_for_what_all_took(tmp_path: Path) -> None:
    runs = [run(options=options, seconds=seconds) for options, seconds in ((STEP, 60), (STEP, 120), ({}, 180))]
    assert "took 5 minutes together: step 5.0." in text_of("took", tmp_path, "step", *runs)


def test_the_page_says_how_fast_memory_was_backed_before_a_table_grew(tmp_path: Path) -> None:
    faster = {"in process": {**GROWTH["in process"], "backed_bytes_per_s": [0.7e9, 1.6e9]}}
    text = text_of("growth", tmp_path, "growth", run(GROWTH, faster))
    assert "at GB/s of 0.5 to 0.7, then 1.5 to 1.6." in text.replace("\n", " ")


def test_two_workers_are_compared_with_one(tmp_path: Path) -> None:
    text = text_of("cluster", tmp_path, "cluster", MADE["cluster"][1])
    assert "with two workers over that with one: sync, 2 x 2: 1.10." in text.replace("\n", " ")


def test_rounds_that_others_disturbed_are_not_drawn(tmp_path: Path) -> None:
    name = str(CHECK["name"])
    rounds = [
        {name: {"step_s": step_s, "others": others, "yardstick_s": 1e-3}}
        for step_s, others in ((1e-4, 0.05), (5e-4, 0.9))
    ]
    block = page.scale(run(*rounds, yardstick_s=1e-3, checks=[CHECK]))
    assert block.plots == page.scale(run(rounds[0], yardstick_s=1e-3, checks=[CHECK])).plots


def test_a_round_of_a_slow_moment_is_drawn_at_the_speed_of_the_others() -> None:
    name = str(CHECK["name"])
    slow, usual = (
        {name: {"step_s": factor * 1e-4, "others": 0.05, "yardstick_s": factor * 1e-3}} for factor in (2.0, 1.0)
    )
    check = {**CHECK, "rounds": 3}
    drawn = page.scale(run(slow, usual, usual, yardstick_s=1e-3, checks=[check])).plots
    assert drawn == page.scale(run(usual, usual, usual, yardstick_s=1e-3, checks=[check])).plots


def test_a_run_outside_git_says_that_its_commit_is_not_known() -> None:
    outside = {**run({}), "commit": None, "is_dirty": None}
    assert page.about(outside).startswith("No commit known, 2026-01-02")
