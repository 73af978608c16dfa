"""What each figure should be, beside what the recorded runs say: the first table of docs/benchmarks.md.

A figure is read from the newest run of its benchmark that was made with the options that the figure is of. The peers'
figures are those of a run that measured them too; one with a star was measured once, apart from ours, and no script
here measures it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.contenders import AHEAD, FLOOR, OURS, PADDLE, PADDLE_DATASET
from benchmarks.record import recorded

Run = dict[str, Any]
"""A recorded run."""
MS, MEGA = 1e-3, 1e6
LARGE = 20_000_000
"""Rows."""


class Goal(NamedTuple):
    """What a figure should be."""

    limit: float
    unit: str
    is_upper: bool

    def __str__(self) -> str:
        return f"at {'most' if self.is_upper else 'least'} {self.limit:g} {self.unit}".rstrip()

    def is_reached(self, value: float) -> bool:
        """Whether it is on the right side."""
        return value <= self.limit if self.is_upper else value >= self.limit


class Found(NamedTuple):
    """What a run says.

    Attributes:
        value: In the unit of the goal.
        peer: What it says of the peer; empty if it says nothing.
        of_rounds: The same of each round, where a round has it.
    """

    value: float
    peer: str = ""
    of_rounds: Sequence[float] = ()


class Figure(NamedTuple):
    """A goal, and where to look.

    Attributes:
        what: Is measured.
        goal: For it.
        benchmark: That measures it.
        of: Options of a run that measures it; None is an option that is not set, or that there was not yet.
        read: Finds it in such a run; None where that has no such figure.
        peer: What the peer takes, where no run says it.
        digits: After the point.
        peer_of: What runs of another benchmark say of the peer; empty if they say nothing.
    """

    what: str
    goal: Goal
    benchmark: str
    of: Mapping[str, Any]
    read: Callable[[Run], Found | None]
    peer: str = ""
    digits: int = 2
    peer_of: Callable[[Path], str] = lambda results: ""


HEADINGS = ("figure", "goal", "measured", "reached", "peer")


def rows(results: Path, figures: Iterable[Figure]) -> list[tuple[str, ...]]:
    """The cells of the table, in the order of `HEADINGS`."""
    return [cells(figure, newest(results, figure), figure.peer_of(results)) for figure in figures]


def newest(results: Path, figure: Figure) -> Found | None:
    """What the newest run says that was made with its options; None where there is none."""
    runs = recorded(results, figure.benchmark)
    fitting = [run for run in runs if all(set_to(run, key) == value for key, value in figure.of.items())]
    return figure.read(fitting[-1]) if fitting else None


def set_to(run: Run, option: str) -> Any:
    """What an option was set to; None for a switch that is off, and one that there was not yet."""
    value = run["options"].get(option)
    return None if value is False else value


def cells(figure: Figure, found: Found | None, peer: str = "") -> tuple[str, ...]:
    """One row of the table; `peer` is what a run of another benchmark says of the peer."""
    told = peer or (f"{figure.peer} \\*" if figure.peer else "")
    if found is None:
        return figure.what, str(figure.goal), "not measured yet", "", told
    measured = f"{found.value:.{figure.digits}f} {figure.goal.unit}".rstrip()
    if len(found.of_rounds) > 1:
        low, high = np.percentile(found.of_rounds, [25, 75])
        measured += f" ({low:.{figure.digits}f} - {high:.{figure.digits}f})"
    is_reached = "yes" if figure.goal.is_reached(found.value) else "no"
    return figure.what, str(figure.goal), measured, is_reached, found.peer or told


def at_most(limit: float, unit: str = "") -> Goal:
    """An upper limit; a ratio has no unit."""
    return Goal(limit, unit, is_upper=True)


def at_least(limit: float, unit: str = "") -> Goal:
    """A lower limit."""
    return Goal(limit, unit, is_upper=False)


def median_s(run: Run, name: str) -> float:
    """Of all steps of a contender."""
    return float(np.median(np.concatenate([each[name]["seconds"] for each in run["rounds"]])))


def ratios(run: Run, name: str, base: str) -> Found:
    """The median step of a contender over that of another in each round, and the median of these.

    The machine is not equally fast in all rounds.
    """
    of_rounds = [median_s({"rounds": [each]}, name) / median_s({"rounds": [each]}, base) for each in run["rounds"]]
    return Found(float(np.median(of_rounds)), of_rounds=of_rounds)


def over_floor(name: str, run: Run) -> Found:
    """Of steps, the ratio to rows from memory."""
    return ratios(run, name, FLOOR)


def over_peer(name: str, run: Run) -> Found:
    """Of steps, the ratio to the peer's."""
    return ratios(run, name, PADDLE)._replace(peer=both(run, name))


def faster_than_peer(name: str, run: Run) -> Found:
    """Of examples a second, the ratio to the peer's."""
    return ratios(run, PADDLE, name)._replace(peer=both(run, name))


def faster_than_dataset(name: str, run: Run) -> Found:
    """Of examples a second, the ratio to those of the peer with its dataset: of means, for it knows no medians."""
    ours, theirs = (
        np.array([np.mean(each[which]["seconds"]) for each in run["rounds"]]) for which in (name, PADDLE_DATASET)
    )
    peer = as_both(float(np.median(theirs)), float(np.median(ours)))
    return Found(float(np.median(theirs / ours)), peer, (theirs / ours).tolist())


def both(run: Run, name: str) -> str:
    """The median step of the peer, and ours."""
    return as_both(median_s(run, PADDLE), median_s(run, name))


def as_both(peer_s: float, our_s: float) -> str:
    """A step of the peer, and ours."""
    return f"{PADDLE}: {peer_s / MS:.1f} ms; ours {our_s / MS:.1f} ms"


def rows_per_s(name: str, part: str, run: Run) -> Found:
    """Of a client's cycles, M rows/s."""
    of_rounds = [run["options"]["batch"] / float(np.median(each[name][part])) / MEGA for each in run["rounds"]]
    times = np.concatenate([each[name][part] for each in run["rounds"]])
    return Found(run["options"]["batch"] / float(np.median(times)) / MEGA, of_rounds=of_rounds)


def growth_rate(way: str, run: Run) -> Found:
    """M rows/s of the slowest stretch, each the median of the rounds."""
    rates = [[each["rows_per_s"] for each in of_round[way]["stretches"]] for of_round in run["rounds"]]
    return Found(float(np.median(rates, axis=0).min()) / MEGA)


def growth_pause(way: str, run: Run) -> Found:
    """Ms of the longest batch of all rounds."""
    return Found(max(each["worst_ms"] for of_round in run["rounds"] for each in of_round[way]["stretches"]))


def growth_memory(run: Run) -> Found:
    """The most bytes a row of a pserver's table, at any size from 1 M rows on."""
    stretches = [each for of_round in run["rounds"] for each in of_round["over the wire"]["stretches"]]
    return Found(max(each["most_bytes_a_row"] for each in stretches))


def growth_memory_at(num_rows: int, run: Run) -> Found:
    """Bytes a row of a pserver's table when it first has so many, a median."""
    firsts = [
        next(each["bytes_a_row"] for each in of_round["over the wire"]["stretches"] if each["num_rows"] >= num_rows)
        for of_round in run["rounds"]
    ]
    return Found(float(np.median(firsts)))


def snapshot_s(name: str, of_peer: str, run: Run) -> Found:
    """Seconds of a save or a load."""
    peer = f"{PADDLE}: {run['peer'][of_peer]:.0f} s" if run["peer"] else ""
    of_rounds = [each[name] for each in run["rounds"]]
    return Found(float(np.median(of_rounds)), peer, of_rounds)


def inserts_of_peer(results: Path) -> str:
    """Rows a second that the peer created for its save, in the newest run that measured one; else nothing."""
    peers = [run["peer"] for run in recorded(results, "snapshot") if run["peer"]]
    return f"{PADDLE}: {peers[-1]['rows'] / peers[-1]['insert_s'] / MEGA:.1f} M rows/s" if peers else ""


def of_process(key: str, unit: float, suffix: str, run: Run) -> Found:
    """Of a pserver process and of the peer's."""
    ours, theirs = (
        [each[name][key] / unit for each in run["rounds"] if name in each]
        for name in ("pserver", f"{PADDLE}, a server")
    )
    peer = f"{PADDLE}: {np.median(theirs):.3g} {suffix}" if theirs else ""
    return Found(float(np.median(ours)), peer, ours)


def find_and_gather(run: Run) -> Found:
    """Of the rate of random lines, in the largest table of dim 16."""
    case = max(
        (case["num_rows"], name)
        for name, case in run["cases"].items()
        if case["kernel"] == "find and gather" and case["dim"] == 16
    )
    of_rounds = [each[case[1]]["limit"] / each[case[1]]["ours"] for each in run["rounds"]]
    return Found(float(np.median(of_rounds)), of_rounds=of_rounds)


def cpu_ms(of_round: Mapping[str, float]) -> float:
    """CPU of a step of the cluster benchmark: of the worker, and of all pservers for it."""
    return of_round["worker_ms"] + of_round["pservers_ms"]


def two_over_one(run: Run) -> dict[str, float]:
    """CPU of a step, of worker and pservers for it, with two workers over that with one: by mode and pservers."""
    rounds = run["rounds"]

    def middle(name: str) -> float:
        return float(np.median([cpu_ms(each[name]) for each in rounds]))

    jobs = [(name, name.replace(", 2 x ", ", 1 x ")) for name in rounds[0] if ", 2 x " in name and "plain" not in name]
    return {two: middle(two) / middle(one) for two, one in jobs if one in rounds[0]}


def two_workers(run: Run) -> Found | None:
    """The largest of them; None where no job has two workers beside one."""
    found = two_over_one(run).values()
    return Found(max(found)) if found else None


_STREAM, _ZMQ = {"channel": "stream", "pservers": 2}, {"channel": "zmq", "pservers": 2}
_SYNC, _ASYNC, _PEER = {"mode": "sync"}, {"mode": "async", "max_step_lag": None}, {"peer": True}
_DATASET = {"dataset_steps": 300}
_AT_ONCE, _SERIAL = {"serial": None}, {"serial": True}
_MATRICES: Mapping[str, dict[str, Any]] = {"": {"mkl_avx2": None}, ", MKL with AVX2": {"mkl_avx2": True}}
_SHARD = {"dim": 16, "batch": 13_000, "rows": 1_000_000, "rule": "adagrad", "rows_dtype": "float32"}
_GROWN, _SAVED = {"rows": LARGE, "fresh": None}, {"rows": 10_000_000, "dim": 16, "pservers": 2}
_IN, _OVER = "in process", "over the wire"
_STEP = "click model, step over its floor"
_EXAMPLES = "click model, async: examples/s over the peer's"
_LOOKUP = "lookup, step over the peer's"
_AHEAD = "looking ahead, serial"
_TWO = "click model, CPU of a step with two workers over that with one; in the worst mode"
_TWO_TRAINERS = f"{PADDLE}: trainer and servers 23.2 + 15.7 ms, with one 20.4 + 7.8"
_NEW, _BATCH, _ROW = "new rows a second", "longest batch of new rows up to 20 M, of all rounds", "memory of a row"
_SAVE, _LOAD, _PROCESS = "save of 10 M rows", "start with 10 M rows", "a pserver process"
_FIND = "find and gather in 20 M rows, over random lines"
_HET = "HET: 0.96 M rows/s, at 1.7 M pulled and 2.2 M pushed"
_INSERTS, _SAVES, _LOADS = f"{PADDLE}: 1.1 M rows/s", f"{PADDLE}: 83 s", f"{PADDLE}: 28 s"
_SIZES, _IDLE, _READY = f"{PADDLE}: 192 bytes, 221 by default", f"{PADDLE}: 273 MB", f"{PADDLE}: 0.7 to 0.9 s"

_over_floor, _ahead_over_floor = partial(over_floor, OURS), partial(over_floor, AHEAD)
_over_peer, _ahead_over_peer = partial(over_peer, OURS), partial(over_peer, AHEAD)
_in_rate, _over_rate = partial(growth_rate, _IN), partial(growth_rate, _OVER)
_save, _save_pushed = partial(snapshot_s, "save", "save_s"), partial(snapshot_s, "save during pushes", "save_s")
_load = partial(snapshot_s, "start and load", "start_with_load_s")
_load_wider = partial(snapshot_s, "start and load, one more", "start_with_load_s")
_idle, _ready = partial(of_process, "resident_bytes", MEGA, "MB"), partial(of_process, "seconds", 1, "s")

CLIENT_GOALS: Mapping[tuple[str, str], Goal] = {
    ("1, zmq", "whole"): at_least(6, "M rows/s"),
    ("1, stream", "whole"): at_least(8, "M rows/s"),
    ("1, stream", "combined"): at_least(9, "M rows/s"),
}
"""By contender and kind of cycle."""
_KINDS = {"whole": "pull and push", "combined": "one combined message"}

FIGURES: Sequence[Figure] = (
    Figure(f"{_STEP}: sync, zmq", at_most(1.2), "step", _ZMQ | _SYNC | _AT_ONCE, _over_floor),
    Figure(f"{_STEP}: async, zmq", at_most(1.3), "step", _ZMQ | _ASYNC | _AT_ONCE, _over_floor),
    *(
        Figure(f"{what}{how}", goal, "step", _STREAM | of | of_matrices, read)
        for how, of_matrices in _MATRICES.items()
        for what, goal, of, read in (
            (f"{_STEP}: sync, stream", at_most(1.12), _SYNC | _AT_ONCE, _over_floor),
            (f"{_STEP}: sync, stream, {_AHEAD}", at_most(1.03), _SYNC | _SERIAL, _ahead_over_floor),
            (f"{_STEP}: async, stream", at_most(1.22), _ASYNC | _AT_ONCE, _over_floor),
            (f"{_EXAMPLES} `exe.run`", at_least(1.5), _ASYNC | _PEER, partial(faster_than_peer, OURS)),
            (f"{_EXAMPLES} `InMemoryDataset`", at_least(1.35), _ASYNC | _DATASET, partial(faster_than_dataset, OURS)),
        )
    ),
    Figure(_TWO, at_most(1.1), "cluster", {}, two_workers, _TWO_TRAINERS),
    Figure(f"{_LOOKUP}: zmq", at_most(0.5), "lookup", _ZMQ | _ASYNC | _PEER | _AT_ONCE, _over_peer),
    Figure(f"{_LOOKUP}: stream", at_most(0.35), "lookup", _STREAM | _ASYNC | _PEER | _AT_ONCE, _over_peer),
    Figure(f"{_LOOKUP}: stream, serial", at_most(0.35), "lookup", _STREAM | _ASYNC | _PEER | _SERIAL, _over_peer),
    Figure(
        f"{_LOOKUP}: stream, {_AHEAD}", at_most(0.25), "lookup", _STREAM | _ASYNC | _PEER | _SERIAL, _ahead_over_peer
    ),
    *(
        Figure(
            f"one client, {name.replace(', ', ' shard, ')}: {_KINDS[part]}",
            goal,
            "client",
            _SHARD,
            partial(rows_per_s, name, part),
            _HET,
        )
        for (name, part), goal in CLIENT_GOALS.items()
    ),
    Figure(f"{_NEW}, {_IN}", at_least(5, "M rows/s"), "growth", _GROWN, _in_rate, _INSERTS, peer_of=inserts_of_peer),
    Figure(
        f"{_NEW}, {_OVER}", at_least(3, "M rows/s"), "growth", _GROWN, _over_rate, _INSERTS, peer_of=inserts_of_peer
    ),
    Figure(f"{_BATCH}, {_IN}", at_most(100, "ms"), "growth", _GROWN, partial(growth_pause, _IN), digits=0),
    Figure(f"{_BATCH}, {_OVER}", at_most(100, "ms"), "growth", _GROWN, partial(growth_pause, _OVER), digits=0),
    Figure(
        f"{_ROW}, 10 M rows", at_most(170, "bytes"), "growth", _GROWN, partial(growth_memory_at, 10_000_000), _SIZES, 0
    ),
    Figure(f"{_ROW}, 1 M to 20 M rows", at_most(190, "bytes"), "growth", _GROWN, growth_memory, digits=0),
    Figure(f"{_SAVE}, 2 pservers", at_most(5, "s"), "snapshot", _SAVED, _save, _SAVES),
    Figure(f"{_SAVE}, 2 pservers, during pushes", at_most(5, "s"), "snapshot", _SAVED, _save_pushed, _SAVES),
    Figure(f"{_LOAD}, 2 pservers", at_most(5, "s"), "snapshot", _SAVED, _load, _LOADS),
    Figure(f"{_LOAD}, 3 pservers that load what 2 saved", at_most(5, "s"), "snapshot", _SAVED, _load_wider, _LOADS),
    Figure(f"{_PROCESS}, idle", at_most(200, "MB"), "start", {}, _idle, _IDLE, 0),
    Figure(f"{_PROCESS}, until ready", at_most(2, "s"), "start", {}, _ready, _READY),
    Figure(_FIND, at_least(0.6), "kernels", {"rows": [1_000_000, LARGE]}, find_and_gather),
)
