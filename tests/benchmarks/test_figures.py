"""What a figure says of hand-made runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks import figures
from benchmarks.contenders import AHEAD, FLOOR, OURS, PADDLE, PADDLE_DATASET

GROWN = {"num_rows": 10_000_000, "rows_per_s": 9e6, "worst_ms": 20.0, "bytes_a_row": 165.0, "most_bytes_a_row": 180.0}
SAVED = {"save": 2.0, "save during pushes": 3.0, "start and load": 4.0, "start and load, one more": 4.5}


def steps(options: Mapping[str, Any], **medians: float) -> dict[str, Any]:
    """A run of steps with one round, of these seconds by contender."""
    names = {"ours": OURS, "ahead": AHEAD, "floor": FLOOR, "peer": PADDLE, "dataset": PADDLE_DATASET}
    one = {names[name]: {"seconds": [seconds]} for name, seconds in medians.items()}
    return {"options": {"pservers": 2, "serial": False, **options}, "rounds": [one]}


def grown(**of_stretch: float) -> dict[str, Any]:
    """A way that grew in two stretches, the first as `GROWN`."""
    return {"stretches": [GROWN, {**GROWN, "num_rows": figures.LARGE, **of_stretch}]}


SYNC = {"mode": "sync", "channel": "stream"}
ASYNC = {"mode": "async", "channel": "stream"}
AVX2 = {"mkl_avx2": True}
FOR_PEER = {**ASYNC, "peer": True}
CLIENT = {"1, zmq": {"whole": [0.002], "combined": [0.001]}, "1, stream": {"whole": [0.0013], "combined": [0.001]}}
CPU = {"worker_ms": 10.0, "pservers_ms": 2.0}
KERNELS = {
    "small": {"kernel": "find and gather", "dim": 16, "num_rows": 1_000_000},
    "large": {"kernel": "find and gather", "dim": 16, "num_rows": figures.LARGE},
    "wide": {"kernel": "find and gather", "dim": 64, "num_rows": figures.LARGE},
}
RUNS: dict[str, list[dict[str, Any]]] = {
    "step": [
        steps(SYNC, ours=1.1, floor=1),
        steps({**SYNC, "channel": "zmq"}, ours=1.15, floor=1),
        steps({**SYNC, "serial": True}, ours=3, ahead=1.02, floor=1),
        steps({**FOR_PEER, "dataset_steps": 300}, ours=1.2, floor=1, peer=2.4, dataset=1.8),
        steps({**ASYNC, "channel": "zmq"}, ours=1.25, floor=1),
        steps({**ASYNC, "max_step_lag": 4}, ours=9, floor=1),
        steps({**SYNC, **AVX2}, ours=1.11, floor=1),
        steps({**SYNC, **AVX2, "serial": True}, ours=9, ahead=1.01, floor=1),
        steps({**FOR_PEER, **AVX2, "dataset_steps": 300}, ours=1.21, floor=1, peer=3.63, dataset=2.42),
    ],
    "lookup": [
        steps({**FOR_PEER, "channel": "zmq"}, ours=0.4, peer=1),
        steps(FOR_PEER, ours=0.3, peer=1),
        steps({**FOR_PEER, "serial": True}, ours=0.2, ahead=0.1, peer=1),
        steps({**FOR_PEER, "mode": "sync"}, ours=9, peer=1),
    ],
    "client": [
        {
            "options": {"dim": 16, "batch": 13_000, "rows": 1_000_000, "rule": "adagrad", "rows_dtype": "float32"},
            "rounds": [CLIENT],
        }
    ],
    "growth": [
        {
            "options": {"rows": figures.LARGE, "fresh": False},
            "rounds": [
                {"in process": grown(worst_ms=90), "over the wire": grown(rows_per_s=4e6)},
                {"in process": grown(rows_per_s=7e6), "over the wire": grown(rows_per_s=6e6, most_bytes_a_row=188)},
            ],
        }
    ],
    "snapshot": [
        {
            "options": {"rows": 10_000_000, "dim": 16, "pservers": 2},
            "rounds": [SAVED],
            "peer": {"save_s": 80.0, "start_with_load_s": 20.0, "rows": 10_000_000, "insert_s": 5.0},
        }
    ],
    "start": [{"options": {}, "rounds": [{"pserver": {"seconds": 1.5, "resident_bytes": 150e6}}]}],
    "kernels": [
        {
            "options": {"rows": [1_000_000, figures.LARGE]},
            "cases": KERNELS,
            "rounds": [{name: {"limit": 0.7, "ours": 2.0 if name != "large" else 1.0} for name in KERNELS}],
        }
    ],
    "cluster": [
        {
            "options": {},
            "rounds": [
                {
                    "async, 1 x 1": CPU,
                    "async, 1 x plain": {**CPU, "pservers_ms": 0.0},
                    "async, 2 x 1": {**CPU, "pservers_ms": 3.2},
                    "sync, 1 x 1": CPU,
                    "sync, 2 x 1": {**CPU, "worker_ms": 10.6},
                }
            ],
        }
    ],
}
EXPECTED = {
    "click model, step over its floor: sync, stream": "1.10",
    "click model, step over its floor: sync, zmq": "1.15",
    "click model, step over its floor: sync, stream, looking ahead, serial": "1.02",
    "click model, step over its floor: async, stream": "1.20",
    "click model, step over its floor: async, zmq": "1.25",
    "click model, async: examples/s over the peer's `exe.run`": "2.00",
    "click model, async: examples/s over the peer's `InMemoryDataset`": "1.50",
    "click model, step over its floor: sync, stream, MKL with AVX2": "1.11",
    "click model, step over its floor: sync, stream, looking ahead, serial, MKL with AVX2": "1.01",
    "click model, step over its floor: async, stream, MKL with AVX2": "1.21",
    "click model, async: examples/s over the peer's `exe.run`, MKL with AVX2": "3.00",
    "click model, async: examples/s over the peer's `InMemoryDataset`, MKL with AVX2": "2.00",
    "click model, CPU of a step with two workers over that with one; in the worst mode": "1.10",
    "lookup, step over the peer's: zmq": "0.40",
    "lookup, step over the peer's: stream": "0.30",
    "lookup, step over the peer's: stream, serial": "0.20",
    "lookup, step over the peer's: stream, looking ahead, serial": "0.10",
    "one client, 1 shard, zmq: pull and push": "6.50 M rows/s",
    "one client, 1 shard, stream: pull and push": "10.00 M rows/s",
    "one client, 1 shard, stream: one combined message": "13.00 M rows/s",
    "new rows a second, in process": "8.00 M rows/s",
    "new rows a second, over the wire": "5.00 M rows/s",
    "longest batch of new rows up to 20 M, of all rounds, in process": "90 ms",
    "longest batch of new rows up to 20 M, of all rounds, over the wire": "20 ms",
    "memory of a row, 10 M rows": "165 bytes",
    "memory of a row, 1 M to 20 M rows": "188 bytes",
    "save of 10 M rows, 2 pservers": "2.00 s",
    "save of 10 M rows, 2 pservers, during pushes": "3.00 s",
    "start with 10 M rows, 2 pservers": "4.00 s",
    "start with 10 M rows, 3 pservers that load what 2 saved": "4.50 s",
    "a pserver process, idle": "150 MB",
    "a pserver process, until ready": "1.50 s",
    "find and gather in 20 M rows, over random lines": "0.70",
}


def write(results: Path, name: str, runs: Sequence[Mapping[str, Any]]) -> None:
    """As runs are recorded."""
    (results / f"{name}.jsonl").write_text("".join(json.dumps(run) + "\n" for run in runs))


def rows_of(results: Path) -> dict[str, tuple[str, ...]]:
    """The rest of each row of the table, by figure."""
    return {what: cells for what, *cells in figures.rows(results, figures.FIGURES)}


def test_every_figure_is_that_of_its_run(tmp_path: Path) -> None:
    for name, runs in RUNS.items():
        write(tmp_path, name, runs)
    assert {what: measured for what, (_, measured, _, _) in rows_of(tmp_path).items()} == EXPECTED


def test_a_figure_is_that_of_the_newest_run_with_its_options(tmp_path: Path) -> None:
    of_sync, newer, of_geo = ({"options": {"mode": mode}} for mode in ("sync", "sync", "geo"))
    runs = [steps(run["options"], ours=ours, floor=1) for run, ours in ((of_sync, 3), (newer, 2), (of_geo, 1))]
    write(tmp_path, "step", runs)
    read = partial(figures.over_floor, OURS)
    sync = figures.Figure("a step", figures.at_most(2), "step", {"mode": "sync"}, read)
    other = figures.Figure("a step", figures.at_most(2), "step", {"mode": "async"}, read, peer="5")
    assert figures.rows(tmp_path, [sync, sync._replace(goal=figures.at_most(1.9, "ms")), other]) == [
        ("a step", "at most 2", "2.00", "yes", ""),
        ("a step", "at most 1.9 ms", "2.00 ms", "no", ""),
        ("a step", "at most 2", "not measured yet", "", r"5 \*"),
    ]


def test_a_ratio_has_the_quartiles_of_the_rounds(tmp_path: Path) -> None:
    run = steps(SYNC, ours=1.0, floor=1.0)
    run["rounds"] = [steps(SYNC, ours=ours, floor=1.0)["rounds"][0] for ours in (1.0, 1.1, 1.2, 1.3, 1.4)]
    write(tmp_path, "step", [run])
    assert rows_of(tmp_path)["click model, step over its floor: sync, stream"][1] == "1.20 (1.10 - 1.30)"


def test_beside_the_peers_dataset_both_are_means(tmp_path: Path) -> None:
    rounds = [
        {OURS: {"seconds": [0.01, 0.01, 0.04]}, FLOOR: {"seconds": [0.01]}, PADDLE_DATASET: {"seconds": [seconds]}}
        for seconds in (0.02, 0.03, 0.05)
    ]
    options = {**ASYNC, "pservers": 2, "dataset_steps": 300}
    write(tmp_path, "step", [{"options": options, "rounds": rounds}])
    _, measured, _, peer = rows_of(tmp_path)["click model, async: examples/s over the peer's `InMemoryDataset`"]
    assert (measured, peer) == ("1.50 (1.25 - 2.00)", "PaddlePaddle 2.6.2: 30.0 ms; ours 20.0 ms")


def test_a_run_without_the_peers_dataset_says_nothing_of_it(tmp_path: Path) -> None:
    write(tmp_path, "step", [steps(FOR_PEER, ours=1.2, floor=1, peer=2.4)])
    rows = rows_of(tmp_path)
    assert rows["click model, async: examples/s over the peer's `exe.run`"][1] == "2.00"
    assert rows["click model, async: examples/s over the peer's `InMemoryDataset`"][1] == "not measured yet"


def test_without_a_job_of_two_workers_their_figure_is_not_measured(tmp_path: Path) -> None:
    write(tmp_path, "cluster", [{"options": {}, "rounds": [{"async, 1 x 1": CPU}]}])
    _, measured, is_reached, _ = rows_of(tmp_path)[next(what for what in EXPECTED if "two workers" in what)]
    assert (measured, is_reached) == ("not measured yet", "")


@pytest.mark.parametrize(
    ("what", "peer"),
    [
        ("new rows a second, in process", "PaddlePaddle 2.6.2: 2.0 M rows/s"),
        ("save of 10 M rows, 2 pservers", "PaddlePaddle 2.6.2: 80 s"),
        ("lookup, step over the peer's: stream", "PaddlePaddle 2.6.2: 1000.0 ms; ours 300.0 ms"),
    ],
)
def test_the_peers_figure_is_that_of_a_run_that_measured_it(tmp_path: Path, what: str, peer: str) -> None:
    for name, runs in RUNS.items():
        write(tmp_path, name, runs)
    assert rows_of(tmp_path)[what][-1] == peer


def test_a_peers_figure_that_no_run_says_has_a_star(tmp_path: Path) -> None:
    peers = [cells[-1] for cells in rows_of(tmp_path).values() if cells[-1]]
    assert peers
    assert all(peer.endswith(r" \*") for peer in peers)
