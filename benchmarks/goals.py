"""Every goal that was ever set, as data, and the figures that the records give for it.

A goal is never removed, reached or not; a new bound for the same figure stands beside the older one. A figure comes
from all runs of the newest commit that was measured with its options (`record.pooled`), none left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.measures import (
    CELLS,
    MEGA,
    SYNC_COMMIT,
    SYNC_PSERVERS_MS,
    WIRE,
    Figure,
    Measure,
    NotApplicable,
    Round,
    against,
    ahead_over_plain,
    auc_where_a_count_fails,
    by_round,
    bytes_at,
    bytes_of_more_rows,
    cached_over_plain,
    cases_within,
    client_rate,
    cpu_over_floor,
    find_and_gather,
    hit,
    largest,
    misses_after_a_move,
    misses_over_the_best_policy,
    more_to_register,
    num_calls,
    of_bound,
    of_reads,
    over_link,
    over_ring,
    p99_under_deltas,
    process,
    saved_bytes,
    saved_over_simulated,
    served_ms,
    served_ratio,
    service,
    slowest_stretch,
    snapshot,
    step_ratio,
    step_with,
    sync_pservers,
    time_to_auc,
    waited,
    worst_shape,
    worst_time_to_auc,
    worst_two_workers,
)
from benchmarks.programs import (
    AHEAD,
    FLOOR,
    IN_MEMORY,
    LOADING,
    OURS,
    PADDLE,
    PADDLE_DATASET,
    PLAIN_TCP,
    QUEUE,
    TLS,
)
from benchmarks.record import Run, pooled_by, recorded

LARGE = 20_000_000  # rows
OLD_COMMIT = "d2badd9"  # steps must not be slower than there


class Goal(NamedTuple):
    """A quantity and the bounds that were set for it.

    Attributes:
        name: Quantity that is measured.
        bounds: Least or largest values that reach it; one row of the table each.
        unit: Unit of the figure; empty for a ratio.
        benchmark: Benchmark that measures it.
        options: Options of the runs that count; None for an option that is not set.
        measure: Computes the figure from pooled runs; returns None if they lack what it needs.
        differs: Letter of the page's note on how the baseline's work differs; empty if it does not.
        is_upper: True if a bound is the largest value.
        digits: Digits after the point.
        baseline: Name of the baseline, or its figure if that was measured once, apart from ours.
        cells: Options by which runs are told apart; of each combination the newest commit counts.
    """

    name: str
    bounds: tuple[float, ...]
    unit: str
    benchmark: str
    options: Mapping[str, Any]
    measure: Callable[[Run], Figure | NotApplicable | None]
    differs: str = ""
    is_upper: bool = True
    digits: int = 2
    baseline: str = ""
    cells: tuple[str, ...] = ()


class Verdict(NamedTuple):
    """One bound of a goal; `run` and `figure` are None where nothing is recorded.

    `why_not` says why a goal does not apply to what was measured, and is empty if it does.
    """

    goal: Goal
    bound: float
    run: Run | None
    figure: Figure | None
    why_not: str = ""

    @property
    def is_reached(self) -> bool:
        """True if there is a figure on the right side of the bound."""
        value = self.figure.value if self.figure else np.nan
        return bool(value <= self.bound if self.goal.is_upper else value >= self.bound)

    @property
    def is_within_noise(self) -> bool:
        """True if the bound lies between the quartiles of the rounds."""
        low, high = self.figure.quartiles if self.figure else (np.nan, np.nan)
        return bool(low <= self.bound <= high)


def verdicts(results: Path) -> list[Verdict]:
    """Returns a verdict for every bound of every goal, in their order."""
    found = []
    for goal in GOALS:
        run = pooled_by(recorded(results, goal.benchmark), goal.cells, **goal.options)
        measured = goal.measure(run) if run else None
        figure, why_not = (None, measured.why) if isinstance(measured, NotApplicable) else (measured, "")
        found += [Verdict(goal, bound, run if measured else None, figure, why_not) for bound in goal.bounds]
    return found


_KEYS = {"mode": "async", "pservers": 2, "cores": 2}
_DURABILITIES = {"workers": 2, "pservers": 2}
_CRITEO = {"exponent": 1.1, "batch": 512, "rows": 10_000_000, "steps": 8000}
_MEMBERS = {"workers": 4000, "batch": 1000}
_STREAM, _ZMQ = {"channel": "stream", "pservers": 2}, {"channel": "zmq", "pservers": 2}
_SYNC, _ASYNC = {"mode": "sync", "serial": None}, {"mode": "async", "max_step_lag": None, "serial": None}
_SERIAL, _PEER, _DATASET = {"serial": True}, {"peer": True}, {"dataset_steps": 300}
_LOOKUPS = _ASYNC | _PEER
_EMBEDDED = _ASYNC | {"pservers": None}  # an option that is 0 counts as not set
_SHARD = {"dim": 16, "batch": 13_000, "rows": 1_000_000, "rule": "adagrad", "rows_dtype": "float32"}
_GROWN, _SAVED, _KERNELS = {"rows": LARGE, "fresh": None}, {"rows": 10_000_000, "pservers": 2}, {"rows": [10**6, LARGE]}
_IN, _WRITE = "in process", "raw write and fsync"
_STEP, _CPU = "click model, step over its floor", "CPU of a step over its floor"
_LOOKUP, _PAUSE = f"lookup, step over {PADDLE}'s", "longest batch of new rows up to 20 M, of all rounds"
_OVER_FLOOR, _AHEAD_OVER_FLOOR = step_ratio(OURS, FLOOR), step_ratio(AHEAD, FLOOR)
_WORKER, _PSERVERS = cpu_over_floor("worker"), cpu_over_floor("pservers")
_OVER_PEER, _AHEAD_OVER_PEER = step_ratio(OURS, PADDLE), step_ratio(AHEAD, PADDLE)
_EXE_RUN = step_ratio(PADDLE, OURS)
# Means on both sides: a dataset has no single steps.
_OVER_DATASET = by_round(lambda each: np.mean(each[PADDLE_DATASET]["seconds"]) / np.mean(each[OURS]["seconds"]))
_BASELINES = {"a": "rows from memory, interleaved", "b": f"{PADDLE}, interleaved"}
_BASELINES |= {"c": f"{PADDLE}, interleaved", "d": f"{PADDLE}, interleaved"}
_HET, _INSERTS = "HET: 0.96 M rows/s \\*", f"{PADDLE}: see the note"
_TWO_WORKERS = "CPU of a step with two workers over that with one; the worst job"
_TWO = f"{PADDLE}: 1.38, of 23.2 + 15.7 ms over 20.4 + 7.8 ms \\*"
_PLAIN, _SPLIT, _ONNX = "plain model", "split network, paddle.inference", "split network, onnxruntime"
_DENSE, _EXE, _S = "dense embedding, paddle.inference", "dense embedding, exe.run", "seconds"
_BYTES = {"exponent": 1.1, "batch": 512, "rows": 10_000_000, "workers": 8, "percent": 5}
_HET_JOBS = [(model, optimizer) for model in ("wide_deep", "deepfm", "dcn") for optimizer in ("adagrad", "adam")]
_LEAST = ("", False, 1)
_HET_AUC = {
    model: f"HET, Criteo, SGD, 8 workers, bound 100 less 0: {difference} \\*"
    for model, difference in (("wide_deep", "-0.0002"), ("deepfm", "-0.0001"), ("dcn", "-0.0001"))
}
_HET_TIME = "HET, 1 Gbit/s, dim 128, 8 workers with GPUs, bound 100: 0.19 to 0.22 \\*"
_DICTIONARIES = (("float32", 80), ("float16", 48), ("int8", 36))
_SIZES = f"{PADDLE}: 192 bytes with 8 shards, 221 by default \\*"


def _steps(
    name: str, bounds: tuple[float, ...], of: dict[str, Any], measure: Measure, differs: str, unit: str = ""
) -> Goal:
    """Returns a goal of a model's steps; the benchmark is that of the model."""
    benchmark = "lookup" if name.startswith("lookup") else "step"
    return Goal(
        name, bounds, unit, benchmark, of, measure, differs, "examples/s" not in name, baseline=_BASELINES[differs]
    )


def _on_stream(how: str, of: dict[str, Any]) -> tuple[Goal, ...]:
    """Returns the goals of the click model on streams, with the kernels for matrices that `of` sets."""
    sync, a_sync, cpu, rate = (
        _STREAM | _SYNC | of,
        _STREAM | _ASYNC | of,
        f"click model, {_CPU}",
        "click model, examples/s",
    )
    return (
        _steps(f"{_STEP}: sync{how}", (1.12, 1.1), sync, _OVER_FLOOR, "a"),
        _steps(f"{_STEP}: async{how}", (1.22, 1.1), a_sync, _OVER_FLOOR, "a"),
        _steps(f"{_STEP}: sync, looking ahead, serial{how}", (1.03,), sync | _SERIAL, _AHEAD_OVER_FLOOR, "a"),
        _steps(f"{cpu}, worker: sync{how}", (0.8,), sync, _WORKER, "a", "ms"),
        _steps(f"{cpu}, pservers: sync{how}", (1.3,), sync, _PSERVERS, "a", "ms"),
        _steps(f"{cpu}, worker: async{how}", (0.8,), a_sync, _WORKER, "a", "ms"),
        _steps(f"{cpu}, pservers: async{how}", (1.3,), a_sync, _PSERVERS, "a", "ms"),
        _steps(f"{rate} over `exe.run`: async{how}", (1.5, 1.25), a_sync | _PEER, _EXE_RUN, "b"),
        _steps(f"{rate} over `InMemoryDataset`: async{how}", (1.35, 1.25), a_sync | _DATASET, _OVER_DATASET, "c"),
    )


def _from_files(how: str, of: dict[str, Any]) -> tuple[Goal, ...]:
    """Returns the goals of training over data sets, with the threads and kernels for matrices that `of` sets."""
    return tuple(
        Goal(
            f"click model, examples/s of `train_from_dataset`: {name}{how}",
            (1.25,),
            "",
            "dataset",
            {"pservers": 2, "peer": True} | of,
            by_round(partial(_over_baseline, case)),
            "n",
            False,
            baseline=_BASELINES["c"],
        )
        for case, name in (
            (IN_MEMORY, "`InMemoryDataset`"),
            (LOADING, "`InMemoryDataset` and its loading"),
            (QUEUE, "`QueueDataset`"),
        )
    )


def _over_baseline(case: str, of_round: Round) -> float:
    seconds: float = of_round[f"{PADDLE}, {case}"]["seconds"] / of_round[case]["seconds"]
    return seconds


def _ahead_on_one_host(how: str, of: dict[str, Any]) -> Goal:
    """Returns the goal of looking ahead where there is little to hide, with the kernels that `of` sets."""
    name = f"click model, step looking ahead over the plain step: async, stream{how}"
    return Goal(name, (1.02,), "", "step", _STREAM | _ASYNC | of, ahead_over_plain, digits=3)


def _behind_link(how: str, of: dict[str, Any]) -> Goal:
    """Returns the goal of the click model behind a link, with the kernels for matrices that `of` sets."""
    options = {"model": "ctr", "mode": "async", "pservers": 2, "serial": None} | of
    name = f"{_STEP}: looking ahead, behind 1 ms and 10 Gbit/s{how}"
    return Goal(name, (1.1,), "", "link", options, over_link("1 ms, 10 Gbit/s"), "a, b")


def _in_all_shapes(how: str, of: dict[str, Any]) -> Goal:
    """Returns the goal of the click model in the shape that costs most, with the kernels that `of` sets."""
    options = {"mode": "async", "pservers": 2, "channel": "stream", "serial": None} | of
    return Goal(
        f"{_STEP}: async, stream, the worst of all shapes{how}", (1.1,), "", "spread", options, worst_shape, "a"
    )


def _client(channel: str, cycle: str, what: str, *bounds: float) -> Goal:
    name, measure = f"one client, 1 shard, {channel}: {what}", client_rate(f"1, {channel}", cycle)
    return Goal(name, bounds, "M rows/s", "client", _SHARD, measure, "f", False, 2, _HET)


def _growth(name: str, bound: float, unit: str, measure: Measure, *more: Any) -> Goal:
    return Goal(name, (bound,), unit, "growth", _GROWN, measure, *more)


def _snapshot(name: str, bound: float, unit: str, differs: str, *of: str) -> Goal:
    return Goal(name, (bound,), unit, "snapshot", _SAVED, snapshot(*of), differs)


def _predicted(channel: str, options: dict[str, Any]) -> Goal:
    name = f"cases that the capacity model predicts to 20 %{channel}"
    return Goal(name, (100,), "%", "scale", options, cases_within, "m", False, 0)


def _against(model: str, what: str, part: str) -> Goal:
    name, options = f"{model} model, {what} over that of commit {OLD_COMMIT}", {"model": model, "against": OLD_COMMIT}
    return Goal(name, (1.02,), "", "compare", {**options, "durability": None}, against(part), digits=3)


def _without_a_log(model: str, durability: str | None) -> Goal:
    """Returns the goal of what a durability costs over the older commit, whose pservers nobody started again."""
    name = f"{model} model, step with durability `{durability or 'snapshot'}` over that of commit {OLD_COMMIT}"
    options = {"model": model, "against": OLD_COMMIT, "durability": durability}
    return Goal(name, (1.01,), "", "compare", options, against("seconds"), digits=3)


def _misses(name: str, bound: float, case: str, key: str, *, belady: bool = False) -> Goal:
    """Returns a goal of a row cache on Criteo's shape."""
    return Goal(name, (bound,), "% of reads", "het_misses", _CRITEO, of_reads(case, key, belady=belady))


def _saved(case: str, what: str, bounds: tuple[float, float, float]) -> tuple[Goal, ...]:
    """Returns the goals of a bound's bytes, by rule."""
    return tuple(
        Goal(
            f"bytes saved by row caches, {what}, {rule}", (bound,), "%", "het_traffic", _BYTES, saved_bytes(of), *_LEAST
        )
        for rule, bound in zip(("SGD", "Adagrad", "Adam"), bounds, strict=True)
        for of in (f"{case}: {rule.lower()}",)
    )


def _long_job(model: str, optimizer: str, num_workers: int) -> dict[str, Any]:
    """Returns the options of the jobs whose AUC counts."""
    return {"model": model, "optimizer": optimizer, "workers": num_workers, "examples": 3_000_000}


def _auc(model: str, optimizer: str, num_workers: int, bound: str, least_saved: float) -> tuple[Goal, Goal]:
    """Returns the goals of the AUC of a model with row caches, and of the rows that they save in the same job."""
    job, of = f"{model}, {optimizer}, {num_workers} workers, {bound}", _long_job(model, optimizer, num_workers)
    auc = of_bound(bound, lambda each: -each["loss_of_auc"])
    saved = of_bound(bound, lambda each: 100 * each["rows_saved"])
    return (
        Goal(
            f"{job}: AUC with row caches less that without",
            (-0.001,),
            "",
            "het_auc",
            of,
            auc,
            is_upper=False,
            digits=4,
            baseline=_HET_AUC[model] if num_workers == 8 else "",
        ),
        Goal(f"{job}: rows saved by row caches", (least_saved,), "%", "het_auc", of, saved, "", False, 1),
    )


def _serving(name: str, bound: float, measure: Measure, unit: str = "") -> Goal:
    """Returns a goal of `serving`; of several cases the worst counts."""
    return Goal(name, (bound,), unit, "serving", {"rows": [1_000_000, 10_000_000]}, measure)


GOALS: Sequence[Goal] = (
    _steps(f"{_STEP}: sync, zmq", (1.2,), _ZMQ | _SYNC, _OVER_FLOOR, "a"),
    _steps(f"{_STEP}: async, zmq", (1.3,), _ZMQ | _ASYNC, _OVER_FLOOR, "a"),
    *_on_stream(", stream", {"mkl_avx2": None}),
    *_on_stream(", stream, MKL with AVX2", {"mkl_avx2": True}),
    _behind_link("", {"mkl_avx2": None}),
    _behind_link(", MKL with AVX2", {"mkl_avx2": True}),
    _in_all_shapes("", {"mkl_avx2": None}),
    _in_all_shapes(", MKL with AVX2", {"mkl_avx2": True}),
    _ahead_on_one_host("", {"mkl_avx2": None}),
    _ahead_on_one_host(", MKL with AVX2", {"mkl_avx2": True}),
    *_from_files("", {"mkl_avx2": None, "threads": 1}),
    *_from_files(", MKL with AVX2", {"mkl_avx2": True, "threads": 1}),
    *_from_files(", 2 threads, MKL with AVX2", {"mkl_avx2": True, "threads": 2}),
    Goal(
        "text of data sets, 26 slots, one core",
        (300,),
        "k lines/s",
        "dataset",
        {},
        by_round(lambda each: each["parser, 26 slots of one id"]["lines_per_s"] / 1e3),
        is_upper=False,
        digits=0,
    ),
    Goal(f"click model, {_TWO_WORKERS}", (1.1,), "", "cluster", {}, worst_two_workers, "e", baseline=_TWO),
    Goal(
        f"click model, sync, 2 workers, CPU of the pservers for a step over that of commit {SYNC_COMMIT}",
        (0.65,),
        "",
        "cluster",
        {},
        sync_pservers,
        "e",
        baseline=f"{SYNC_COMMIT}: {SYNC_PSERVERS_MS} ms \\*",
    ),
    _steps(f"{_LOOKUP}: zmq", (0.5,), _LOOKUPS | _ZMQ, _OVER_PEER, "d"),
    _steps(f"{_LOOKUP}: stream", (0.35, 0.32), _LOOKUPS | _STREAM, _OVER_PEER, "d"),
    _steps(f"{_LOOKUP}: stream, serial", (0.35, 0.27), _LOOKUPS | _STREAM | _SERIAL, _OVER_PEER, "d"),
    _steps(f"{_LOOKUP}: stream, looking ahead, serial", (0.25,), _LOOKUPS | _STREAM | _SERIAL, _AHEAD_OVER_PEER, "d"),
    Goal(
        "lookup, step with a row cache over without: async, stream, serial",
        (0.75,),
        "",
        "lookup",
        _STREAM | _ASYNC | _SERIAL,
        cached_over_plain,
        digits=3,
    ),
    Goal(
        "click model, step with a row cache over without: async, stream, serial",
        (1.02,),
        "",
        "step",
        _STREAM | _ASYNC | _SERIAL,
        cached_over_plain,
        digits=3,
    ),
    _steps(f"lookup, {_CPU}, worker: stream", (0.8,), _LOOKUPS | _STREAM, _WORKER, "a", "ms"),
    _steps(f"lookup, {_CPU}, pservers: stream", (1.1,), _LOOKUPS | _STREAM, _PSERVERS, "a", "ms"),
    _steps(f"lookup, {_CPU}, in all: embedded", (1.2,), _EMBEDDED, _WORKER, "a", "ms"),
    Goal(
        "click model, Python and C calls of a step's pull and push, 2 shards",
        (150,),
        "",
        "parts",
        {"model": "click", "pservers": 2, "channel": "stream"},
        num_calls,
        digits=0,
    ),
    _client("zmq", "whole", "pull and push", 6, 7.5),
    _client("stream", "whole", "pull and push", 8, 11),
    _client("stream", "combined", "one combined message", 9),
    _growth(f"new rows a second, {_IN}", 5, "M rows/s", slowest_stretch(_IN), "g", False, 2, _INSERTS),
    _growth(f"new rows a second, {WIRE}", 3, "M rows/s", slowest_stretch(WIRE), "g", False, 2, _INSERTS),
    _growth(f"{_PAUSE}, {_IN}", 100, "ms", largest(_IN, "worst_ms"), "", True, 0),
    _growth(f"{_PAUSE}, {WIRE}", 100, "ms", largest(WIRE, "worst_ms"), "", True, 0),
    _growth("memory of a row, 10 M rows", 170, "bytes", bytes_at(10_000_000), "h", True, 0, _SIZES),
    _growth("memory of a row, 1 M to 20 M rows", 190, "bytes", largest(WIRE, "most_bytes_a_row"), "", True, 0),
    _snapshot("save of 10 M rows", 5, "s", "i", "save", "", "save_s"),
    _snapshot("save of 10 M rows, during pushes", 5, "s", "i", "save during pushes", "", "save_s"),
    _snapshot("save of 10 M rows, over a raw write and fsync", 1.5, "", "", "save", _WRITE),
    _snapshot("load of 10 M rows, over a raw write and fsync", 1.5, "", "l", "the load of that, by difference", _WRITE),
    _snapshot("p99 of pushes during a save, over idle", 3, "", "", "push during a save, p99 ms", "push, p99 ms"),
    _snapshot("start with 10 M rows, 2 pservers", 5, "s", "j", "start and load", "", "start_with_load_s"),
    _snapshot("start with 10 M rows, 3 pservers", 5, "s", "j", "start and load, one more", "", "start_with_load_s"),
    Goal("a pserver process, idle", (200,), "MB", "start", {}, process("resident_bytes", MEGA, "MB"), "k", digits=0),
    Goal("a pserver process, until ready", (2,), "s", "start", {}, process("seconds", 1, "s"), "k"),
    Goal(
        "1000 workers register at once, CPU of a pserver",
        (2,),
        "s",
        "membership",
        _MEMBERS,
        by_round(lambda each: each["registrations 1 to 1000"]["cpu_s"]),
    ),
    Goal(
        "heartbeats of 4000 workers, CPU of a pserver",
        (5,),
        "% of a core",
        "membership",
        _MEMBERS,
        by_round(lambda each: 100 * each["heartbeats of 4000 workers"]["cpu_share"]),
    ),
    Goal(
        "click model, step over TLS over that over plain TCP, two cores",
        (1.25,),
        "",
        "keys",
        _KEYS,
        step_ratio(TLS, PLAIN_TCP),
    ),
    Goal("a registration with keys, more than without", (50,), "ms", "keys", _KEYS, more_to_register, digits=1),
    Goal(
        "find and gather in 20 M rows, over random lines", (0.6,), "", "kernels", _KERNELS, find_and_gather, "", False
    ),
    *(
        goal
        for distribution, most_ns in (("uniform", 20), ("Zipf", 12))
        for goal in (
            Goal(
                f"hit of a row cache of 1 M rows, {distribution}",
                (most_ns,),
                "ns a row",
                "kernels",
                _KERNELS,
                hit(distribution, lambda each, batch: 1e9 * each["ours"] / batch),
            ),
            Goal(
                f"hit of a row cache of 1 M rows over its search alone, {distribution}",
                (1.3,),
                "",
                "kernels",
                _KERNELS,
                hit(distribution, lambda each, batch: each["ours"] / each["find"]),
            ),
        )
    ),
    Goal(
        "100 000 fresh ids on a shard, counted exactly",
        (5,),
        "ms",
        "entries",
        {},
        by_round(lambda each: each["100 000 fresh ids, exact counters"]["median_ms"]),
    ),
    Goal(
        "100 000 fresh ids on a shard, counted in a sketch",
        (5,),
        "ms",
        "entries",
        {},
        by_round(lambda each: each["100 000 fresh ids, a sketch"]["median_ms"]),
    ),
    Goal(
        "ids that occur once and have a row, counted exactly",
        (0,),
        "%",
        "entries",
        {},
        by_round(lambda each: 100 * each["60 % one-touch ids, exact counters"]["once_with_row"]),
    ),
    Goal(
        "a shard continues from 10 M rows and 1 GB of log",
        (10,),
        "s",
        "log",
        {"rows": 10_000_000, "megabytes": 1024},
        by_round(lambda each: each["restart"]["seconds"]),
    ),
    *(
        Goal(
            f"click model, 2 workers, 2 pservers, {mode}: step with `{durability}` over `none`",
            (bound,),
            "",
            "durability",
            _DURABILITIES,
            by_round(step_with(mode, durability)),
            digits=3,
        )
        for durability, bound in (("snapshot", 1.01), ("log", 1.1))
        for mode in ("async", "sync")
    ),
    *(
        _misses(
            f"misses of a row cache of {percent} % of the rows", bound, f"{percent} %: aged LFU", "missed", belady=True
        )
        for percent, bound in ((1, 17.8), (3, 11.0), (5, 9.2), (10, 7.0))
    ),
    *(
        _misses(f"rows that enter a row cache of {percent} % of the rows", bound, f"{percent} %: aged LFU", "entered")
        for percent, bound in ((1, 2.5), (5, 3.5))
    ),
    Goal(
        "misses of a row cache 200 to 500 steps after the hot set moved, less those of LRU or LFU that starts empty",
        (1,),
        "% points",
        "het_misses",
        _CRITEO,
        misses_after_a_move,
    ),
    *_saved("lag 100, share off", "8 workers, 5 % of the rows, dim 64, lag 100, share off", (77, 67, 58)),
    *_saved("lag 100, share 1/4", "8 workers, 5 % of the rows, dim 64, lag 100, share 1/4", (67, 57, 46)),
    *_saved("one worker", "one worker, 5 % of the rows, dim 64", (88, 83, 78)),
    *(
        Goal(
            f"bytes saved by row caches by {what} over the simulated ones, 1 to 8 workers, dims 16 to 256; worst job",
            (0.98,),
            "",
            "het_traffic",
            _BYTES,
            saved_over_simulated(key),
            "",
            False,
            3,
        )
        for what, key in (("frames", "ratio"), ("the kernel", "ratio_by_kernel"))
    ),
    *(goal for job in _HET_JOBS for goal in _auc(*job, 8, "drift 2 x rate", 75)),
    *(goal for job in _HET_JOBS for goal in _auc(*job, 4, "drift 2 x rate", 82)),
    *(goal for job in _HET_JOBS for goal in _auc(*job, 8, "lag 100, share 1/4", 70)),
    *(
        Goal(
            f"{model}, {optimizer}, 8 workers, AUC with a drift less that without, where a lag of 100 alone loses 0.01",
            (-0.001,),
            "",
            "het_auc",
            _long_job(model, optimizer, 8),
            auc_where_a_count_fails,
            "",
            False,
            4,
        )
        for model, optimizer in _HET_JOBS
    ),
    *(
        Goal(
            f"time to AUC with row caches over without, 4 workers{shards}, {rate} Mbit/s, dim {dim}{length}",
            (bound,),
            "",
            "het_link",
            {
                "rate": rate,
                "dim": dim,
                "model": "wide_deep",
                "workers": 4,
                "pservers": pservers,
                "dense": "workers",
                "examples": examples,
            },
            time_to_auc,
            baseline=_HET_TIME,
        )
        for pservers, shards in ((2, ""), (1, ", one pserver for rows"))
        for rate, dim, bound in ((100, 128, 0.35), (1000, 256, 0.5))
        for examples, length in ((400_000, ""), (1_200_000, ", 1.2 M examples"))
    ),
    Goal(
        "time to AUC with row caches over without, 4 workers; the worst of all dims and links up to 1 Gbit/s",
        (1.05,),
        "",
        "het_link",
        {"workers": 4, "dense": "workers"},
        worst_time_to_auc,
        cells=CELLS,
    ),
    Goal(
        "dense beside the workers, bytes of the busiest link over a ring's 2 D (W - 1) / W; the worst job",
        (1.03,),
        "",
        "dense",
        {},
        over_ring,
        digits=3,
    ),
    *(
        Goal(
            f"save, 8 workers, 500 000 cached rows each, dim 16, one pserver on 1 Gbit/s, {rows}{what}: training waits",
            (bound,),
            "s",
            "het_save",
            {"rate": 1000, "dim": 16, "workers": 8, "rows": 500_000, "trace_steps": trace_steps},
            waited(rows),
        )
        for trace_steps, what in ((1500, ""), (None, ", an update of every row held"))
        for rows, bound in (("lag 100, share 1/4", 1.0), ("drift 2 x rate", 2.0))
    ),
    _serving("plain model, CPU over a dense embedding's, batch 1", 1.6, served_ratio(_PLAIN, _DENSE, (1,), "cpu_s")),
    _serving(
        "plain model, CPU over a dense embedding's, batch 32, 512",
        1.8,
        served_ratio(_PLAIN, _DENSE, (32, 512), "cpu_s"),
    ),
    *(
        _serving(f"`paddle.inference` over `exe.run`, batch {batch}", bound, served_ratio(_DENSE, _EXE, (batch,), _S))
        for batch, bound in ((1, 0.4), (32, 0.7), (512, 1.0))
    ),
    *(
        _serving(
            f"onnxruntime over `paddle.inference`, batch {batch}", bound, served_ratio(_ONNX, _SPLIT, (batch,), _S)
        )
        for batch, bound in ((1, 0.6), (32, 0.6), (512, 0.8))
    ),
    *(
        _serving(
            f"read of a batch of {batch}, {num} read-only pserver(s)",
            bound,
            served_ms(f"read, {num} pserver(s)", batch),
            "ms",
        )
        for num, bounds in ((1, (0.3, 0.45, 1.6)), (2, (0.5, 0.8, 2.0)))
        for batch, bound in zip((1, 32, 512), bounds, strict=True)
    ),
    _serving("p99 of reads while deltas of 100 000 rows come every 2 s, over quiet", 1.5, p99_under_deltas),
    _serving(
        "from the manifest of such a delta to the first prediction with it",
        0.25,
        service("from manifest to prediction", lambda of: float(np.median(of[_S]))),
        "s",
    ),
    *(
        _serving(
            f"from a {what} by one delta to the first prediction with that version",
            0.25,
            service(f"from {what} to prediction", lambda of: float(np.median(of[_S]))),
            "s",
        )
        for what in ("rollback", "promotion")
    ),
    _serving("kill -9 of a replica: failed predictions", 0, service("kill of a replica", lambda of: of["num_failed"])),
    _serving(
        "kill -9 of a replica: longest time without an answer",
        0.3,
        service("kill of a replica", lambda of: max(of[_S])),
        "s",
    ),
    *(
        _serving(f"bytes a row, 10 M rows: {name}", bound, service(name, lambda of: of["bytes_a_row"]), "bytes")
        for name, bound in ((f"dictionary, {dtype}", size) for dtype, size in _DICTIONARIES)
    ),
    _serving("bytes a row, 1 M to 10 M rows: read-only pserver", 105, bytes_of_more_rows, "bytes"),
    _serving("start of a read-only pserver with 10 M rows", 4, service("start", lambda of: max(of[_S])), "s"),
    Goal(
        "worker cache of 15 % of the rows: misses over those of the best policy",
        (1,),
        "% points",
        "het_misses",
        _CRITEO,
        misses_over_the_best_policy,
    ),
    _predicted("", {"channel": None}),
    _predicted(", stream", {"channel": "stream"}),
    *(
        _against(model, what, part)
        for model in ("step", "lookup")
        for what, part in (("step", "seconds"), ("worker's CPU", "worker_cpu_s"), ("pservers' CPU", "pservers_cpu_s"))
    ),
    *(_without_a_log("step", durability) for durability in ("none", None)),
)
"""All goals, in the order of the table."""
