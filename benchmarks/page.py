"""docs/benchmarks.md and its plots: the template `page.md.j2`, filled with tables of the recorded runs.

Every figure follows the rule of `record.pooled`: it comes from all runs of the newest commit with the same options. A
cell is the median over all rounds of these runs, with the quartiles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np

from benchmarks import plots
from benchmarks.goals import Verdict, verdicts
from benchmarks.measures import CELLS, MEGA, MS, job_cpu_ms, median_s, shape_over_floor, step_ratio, two_workers
from benchmarks.programs import FLOOR, PADDLE, PLAIN_TCP, floor_name
from benchmarks.record import RESULTS, ROOT, Run, options_of, recorded, ways

DOCS = ROOT / "docs"
PLOTS = "plots"
GB = 1e9
WAYS_TO_STEP = ("mode", "max_step_lag", "channel", "serial", "mkl_avx2")
WAYS = {
    "step": WAYS_TO_STEP,
    "lookup": WAYS_TO_STEP,
    "parts": ("model", *WAYS_TO_STEP),
    "link": ("model", *WAYS_TO_STEP),
    "spread": WAYS_TO_STEP,
    "convergence": ("data",),
    "compare": ("model", "against", "durability"),
    "het_auc": ("model", "optimizer", "workers", "examples"),
    "het_link": CELLS,
    "het_save": ("trace_steps",),
}
"""Options by which the runs of a benchmark are told apart; each combination has rows of its own."""
NOTHING = "No run is recorded yet.\n"

Round = Mapping[str, Any]


class Cell(NamedTuple):
    """A case in a round of a run."""

    run: Run
    round: Round
    case: str

    @property
    def of(self) -> Any:
        """Measurements of the case."""
        return self.round[self.case]

    @property
    def plain(self) -> Any:
        """Measurements of plain Paddle with as many workers; a KeyError in plain Paddle's own case."""
        return self.round["" if self.case.endswith("plain") else f"{self.case.rpartition(' ')[0]} plain"]


class Column(NamedTuple):
    """A column of a table: the value or values of a cell. A KeyError leaves the cell empty."""

    heading: str
    digits: int
    values: Callable[[Cell], Any]


def key(heading: str, digits: int, name: str, unit: float = 1.0) -> Column:
    """Returns the column of a measured quantity in another unit."""
    return Column(heading, digits, lambda at: np.asarray(at.of[name]) / unit)


def ratio(heading: str, name: str, base: str) -> Column:
    """Returns the column of one quantity of a case over another one."""
    return Column(heading, 2, lambda at: at.of[name] / at.of[base])


def over(heading: str, base: str) -> Column:
    """Returns the column of a case's seconds over those of another case."""
    return Column(heading, 2, lambda at: at.of["s"] / at.round[base]["s"])


def cycles(heading: str, *parts: str) -> Column:
    """Returns the column of M rows/s of a client's cycles with these parts."""
    return Column(
        heading, 2, lambda at: at.run["options"]["batch"] / sum(np.array(at.of[part]) for part in parts) / MEGA
    )


def cpu_ms(side: str) -> Column:
    """Returns the column of the CPU of a step, of `worker` or `pservers`."""
    return Column(f"{side} CPU ms", 1, lambda at: at.of[f"{side}_cpu_s"] / len(at.of["seconds"]) / MS)


def cpu_ms_over_floor(side: str) -> Column:
    """Returns the column of the CPU of a step less the floor's in the same round; empty for the floor."""
    part = f"{side}_cpu_s"

    def values(at: Cell) -> float:
        rest = {name: of for name, of in at.round.items() if name != at.case}
        ours, base = (of[part] / len(of["seconds"]) / MS for of in (at.of, rest[FLOOR]))
        return float(ours - base)

    return Column(f"{side} CPU ms over the floor", 1, values)


def cpu_ms_over_floor_of_shape(side: str) -> Column:
    """Returns the column of the CPU of a step of a shape less that of its floor in the same round."""
    part = f"{side}_cpu_s"

    def values(at: Cell) -> float:
        ours, base = (of[part] / len(of["seconds"]) / MS for of in (at.of, at.round[floor_name(at.case)]))
        return float(ours - base)

    return Column(f"{side} CPU ms over the floor", 1, values)


def over_commit(heading: str, part: str) -> Column:
    """Returns the column of a median of this commit over the other commit's."""
    return Column(heading, 3, lambda at: np.median(at.round["this"][part]) / np.median(at.of[part]))


def s_to_target(at: Cell) -> float:
    """Returns the seconds until a job reached the AUC; infinity if it did not."""
    return float(at.of["s_to_target"]) if at.of["has_reached"] else np.inf


STEP_COLUMNS = (
    key("ms a step", 2, "seconds", MS),
    Column("over the floor", 2, lambda at: np.median(at.of["seconds"]) / np.median(at.round[FLOOR]["seconds"])),
    Column("examples/s", 0, lambda at: at.run["batch"] / np.median(at.of["seconds"])),
    cpu_ms("worker"),
    cpu_ms_over_floor("worker"),
    cpu_ms("pservers"),
    cpu_ms_over_floor("pservers"),
)
COLUMNS: Mapping[str, Sequence[Column]] = {
    "start": (key("s until ready", 2, "seconds"), key("MB resident", 0, "resident_bytes", MEGA)),
    "membership": (
        key("CPU s", 2, "cpu_s"),
        key("s until all are registered", 2, "s"),
        key("% of a core", 2, "cpu_share", 0.01),
        key("MB resident", 0, "resident_bytes", MEGA),
    ),
    "keys": (
        key("ms a step", 2, "seconds", MS),
        Column("over plain TCP", 2, lambda at: np.median(at.of["seconds"]) / np.median(at.round[PLAIN_TCP]["seconds"])),
        cpu_ms("worker"),
        cpu_ms("pservers"),
        key("ms to register", 1, "register_s", MS),
    ),
    "kernels": (
        Column("M rows/s", 1, lambda at: at.run["cases"][at.case]["batch"] / at.of["ours"] / MEGA),
        ratio("the limit's time over ours", "limit", "ours"),
        ratio("NumPy's time over ours", "NumPy", "ours"),
        ratio("memcpy's time over ours", "memcpy", "ours"),
        ratio("find's time over ours", "find", "ours"),
    ),
    "entries": (
        key("ms a push", 2, "median_ms"),
        key("longest push, ms", 0, "worst_ms"),
        key("rows", 0, "num_rows"),
        key("MB", 1, "num_bytes", MEGA),
        key("% of one-touch ids with a row", 2, "once_with_row", 0.01),
        key("AUC", 4, "auc"),
    ),
    "het_misses": (key("misses, %", 2, "missed", 0.01), key("rows that enter, %", 2, "entered", 0.01)),
    "het_traffic": (
        *(key(f"bytes saved, dim {dim}, %", 1, f"dim {dim}", 0.01) for dim in (16, 64, 128)),
        key("rows saved, %", 1, "rows", 0.01),
        key("bytes saved by frames, %", 1, "measured", 0.01),
        key("by the kernel, %", 1, "by_kernel", 0.01),
        key("simulated, %", 1, "simulated", 0.01),
        key("frames over simulated", 3, "ratio"),
        key("kernel over simulated", 3, "ratio_by_kernel"),
    ),
    "het_cost": (
        key("distinct rows", 0, "rows"),
        key("worker, ms a step", 3, "worker_s", MS),
        key("pserver, ms a step", 3, "pserver_s", MS),
    ),
    "het_auc": (
        key("AUC", 4, "auc"),
        key("less that without a cache", 4, "loss_of_auc", -1),
        key("rows saved, %", 1, "rows_saved", 0.01),
        key("hits, %", 1, "hit_rate", 0.01),
        key("examples/s", 0, "examples_per_s"),
    ),
    "het_link": (
        Column("s to the target", 1, s_to_target),
        Column("over no cache", 2, lambda at: s_to_target(at) / at.round["no cache"]["s_to_target"]),
        key("target AUC", 4, "target"),
        key("reached, %", 0, "has_reached", 0.01),
        key("AUC", 4, "auc"),
        key("s of training", 1, "train_s"),
        key("GB of training", 2, "num_bytes", GB),
        key("GB by the kernel, with evaluations", 2, "num_bytes_of_kernel", GB),
    ),
    "het_save": (
        key("s that training waits", 2, "waited_s"),
        key("rows with held updates, all workers", 0, "held"),
    ),
    "log": (
        key("ms a push", 2, "median_ms"),
        key("p99, ms", 2, "p99_ms"),
        key("s to continue", 2, "seconds"),
        key("MB of log", 0, "num_bytes", MEGA),
    ),
    "local": tuple(
        key(f"{library}, ms a cycle", 2, library, MS)
        for library in ("fleet_sparse, a store", "NumPy", "PaddlePaddle", "PyTorch")
    ),
    "serving": (
        Column("p50 ms", 3, lambda at: 1e3 * np.median(at.of["seconds"])),
        Column("p99 ms", 3, lambda at: 1e3 * np.percentile(at.of["seconds"], 99)),
        Column("CPU ms", 3, lambda at: 1e3 * at.of["cpu_s"] / len(at.of["seconds"])),
        key("bytes a row", 1, "bytes_a_row"),
        key("failed", 0, "num_failed"),
        key("MB", 0, "resident_bytes", MEGA),
    ),
    "step": STEP_COLUMNS,
    "lookup": STEP_COLUMNS,
    "dataset": (
        Column("examples/s", 0, lambda at: at.run["batch"] / at.of["seconds"]),
        key("worker CPU ms", 1, "worker_cpu_s", MS),
        key("pservers CPU ms", 1, "pservers_cpu_s", MS),
        key("k lines/s", 0, "lines_per_s", 1e3),
        key("MB/s", 0, "bytes_per_s", MEGA),
    ),
    "link": (*STEP_COLUMNS, cpu_ms("proxy")),
    "spread": (
        Column("distinct rows", 0, lambda at: at.run["num_distinct"][at.case]),
        key("ms a step", 2, "seconds", MS),
        Column("over the floor", 2, lambda at: shape_over_floor(at.round, at.case)),
        cpu_ms_over_floor_of_shape("worker"),
        cpu_ms_over_floor_of_shape("pservers"),
    ),
    "parts": (
        Column("ms", 2, lambda at: np.array(at.of) / MS),
        Column("% of the floor's step", 0, lambda at: 100 * np.array(at.of) / median_s(at.run["rounds"], FLOOR)),
    ),
    "growth": (
        key("M rows/s", 1, "rows_per_s", MEGA),
        key("median ms a batch", 2, "median_ms"),
        key("longest batch, ms", 0, "worst_ms"),
        key("bytes a row", 1, "bytes_a_row"),
        key("most on the way", 1, "most_bytes_a_row"),
    ),
    "client": (
        key("distinct ids, us", 0, "dedup", 1e-6),
        key("pull, us", 0, "pull", 1e-6),
        key("push, us", 0, "push", 1e-6),
        cycles("M rows/s", "whole"),
        cycles("with distinct ids", "whole", "dedup"),
        cycles("combined", "combined"),
        key("kB a cycle", 0, "num_bytes", 1e3),
    ),
    "cluster": (
        key("examples/s", 0, "examples_per_s"),
        Column("over plain", 2, lambda at: at.of["examples_per_s"] / at.plain["examples_per_s"]),
        key("worker CPU ms", 1, "worker_ms"),
        Column("worker CPU ms over plain", 1, lambda at: at.of["worker_ms"] - at.plain["worker_ms"]),
        key("pservers CPU ms", 1, "pservers_ms"),
        Column("CPU over plain", 2, lambda at: job_cpu_ms(at.of) / job_cpu_ms(at.plain)),
        key("cores others used", 1, "others"),
    ),
    "durability": (
        key("ms a step", 2, "seconds", MS),
        Column("over none", 3, lambda at: at.of["seconds"] / at.round[f"{at.case.partition(',')[0]}, none"]["seconds"]),
        key("worker CPU ms", 2, "worker_cpu_s", MS),
        key("pservers CPU ms", 2, "pservers_cpu_s", MS),
    ),
    "snapshot": (
        key("s", 2, "s"),
        over("over a raw write and fsync", "raw write and fsync"),
        over("over a raw read", "raw read"),
        key("MB", 1, "bytes", MEGA),
        key("ms", 1, "ms"),
    ),
    "dense": (
        Column("ms", 2, lambda at: np.array(at.of) / MS),
        key("bytes of the busiest link over a ring's", 3, "over_ring"),
    ),
    "convergence": (
        key("test AUC", 4, "test_auc"),
        Column("less the first row's", 5, lambda at: at.of["test_auc"] - next(iter(at.round.values()))["test_auc"]),
        key("examples/s", 0, "examples_per_s"),
    ),
    "compare": (
        over_commit("step", "seconds"),
        over_commit("worker's CPU", "worker_cpu_s"),
        over_commit("pservers' CPU", "pservers_cpu_s"),
    ),
}
"""Columns of the table of each benchmark."""


def write(results: Path = RESULTS, docs: Path = DOCS) -> None:
    """Writes the page and its plots."""
    for name, content in files(results).items():
        path = docs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")


def files(results: Path) -> dict[str, str]:
    """Returns the page and its plots, by path under `docs`."""
    page = Page(results)
    loader = jinja2.FileSystemLoader(ROOT / "benchmarks")
    environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    return {"benchmarks.md": environment.get_template("page.md.j2").render(page=page), **page.plots}


class Page:
    """What the template shows of the recorded runs, as markdown.

    Args:
        results: Directory of the results files.

    Attributes:
        plots: SVG of the plots that were shown, by path under `docs`.
    """

    def __init__(self, results: Path) -> None:
        self.plots: dict[str, str] = {}
        self._results = results
        self._verdicts = verdicts(results)

    def num_goals(self) -> Counter[str]:
        """Returns the number of goals: `all`, `noise` for all within noise, and what `state` returns."""
        counts = Counter(map(state, self._verdicts))
        return counts + Counter(noise=sum(each.is_within_noise for each in self._verdicts), all=len(self._verdicts))

    def goals(self) -> str:
        """Returns the table of all goals."""
        heading = "figure|goal|measured (quartiles of rounds)|reached|baseline|note|commit, runs"
        return table(heading.split("|"), map(goal_cells, self._verdicts))

    def machines(self) -> str:
        """Returns a sentence for each machine that runs were recorded on."""
        runs = [run for file in sorted(self._results.glob("*.jsonl")) for run in recorded(self._results, file.stem)]
        return " ".join(dict.fromkeys(map(machine, runs))) or NOTHING

    def ways(self, name: str) -> list[Run]:
        """Returns all runs of a benchmark's newest commit as one, for each combination of the options in `WAYS`."""
        return ways(recorded(self._results, name), WAYS.get(name, ()))

    def table(self, name: str, plot: str = "", unit: str = "", mark: float | None = None) -> str:
        """Returns the table of a benchmark; `plot` is the heading of the column that is drawn under it."""
        rows, bars = [], []
        for run in self.ways(name):
            for case in dict.fromkeys(case for each in run["rounds"] for case in by_case(run, each)):
                label = ": ".join(filter(None, [way_of(name, run), case]))
                cells = [cell_values(column, run, case) for column in COLUMNS[name]]
                rows.append((label, *map(spread, cells, (column.digits for column in COLUMNS[name])), source(run)))
                bars += [
                    plots.bar(label, values)
                    for column, values in zip(COLUMNS[name], cells, strict=True)
                    if column.heading == plot and len(values) and not np.all(values == mark)
                ]
        if not rows:
            return NOTHING
        text = table(["", *(column.heading for column in COLUMNS[name]), "commit, runs"], rows)
        title = f"{name}: {plot}"
        return text + (
            self._plot(f"{name.replace('_', '-')}.svg", title, plots.bars(title, unit, bars, mark)) if bars else ""
        )

    def probes(self) -> str:
        """Returns what one connection found on each link, medians of the runs that the page shows."""
        found: dict[str, list[list[float]]] = {}
        for of_way in self.ways("link"):
            for run in of_way["runs"]:
                for name, of_link in run["probes"].items():
                    found.setdefault(name, []).append(list(of_link.values()))
        medians = {name: np.median(values, axis=0) for name, values in found.items()}
        told = [
            f"{name}: {echo_ms:.2f} ms, {up:.1f} and {down:.1f} Gbit/s" for name, (echo_ms, up, down) in medians.items()
        ]
        return "; ".join(told) or "not measured"

    def growth_curves(self) -> str:
        """Returns plots of the rate and of the memory of a row while a table grows."""
        text = ""
        for run in self.ways("growth"):
            curves = {
                f"{way}, round {n}": each[way]["curve"] for n, each in enumerate(run["rounds"], 1) for way in each
            }
            for name, title, at, unit in (("rate", "M rows/s", 1, MEGA), ("memory", "bytes a row", 2, 1)):
                series = {
                    way: [(point[0], point[at] / unit) for point in curve] for way, curve in curves.items() if curve
                }
                if series:
                    text += self._plot(f"growth-{name}.svg", title, plots.lines(title, "rows", title, series))
        return text

    def misses_curves(self) -> str:
        """Returns the plot of misses of row caches over their size."""
        series: dict[str, list[tuple[float, float]]] = {}
        for run in self.ways("het_misses"):
            for case in run["rounds"][0]:
                percent, is_sized, cache = case.partition(" %: ")
                if is_sized:
                    missed = 100 * float(np.median([each[case]["missed"] for each in run["rounds"]]))
                    series.setdefault(cache, []).append((float(percent), missed))
        return self._curves("het-misses.svg", "misses, % of reads", "rows that are cached, %", series)

    def saved_curves(self) -> str:
        """Returns the plot of rows that caches save over their bound, by number of workers."""
        series: dict[str, list[tuple[float, float]]] = {}
        for run in self.ways("het_traffic"):
            for case in run["rounds"][0]:
                if case.startswith("simulated, "):
                    _, num_workers, lag, share = case.split(", ")
                    saved = 100 * float(np.median([each[case]["rows"] for each in run["rounds"]]))
                    series.setdefault(f"{num_workers}, {share}", []).append((float(lag.split()[1]), saved))
        return self._curves("het-traffic.svg", "rows saved, %", "max_row_lag", series)

    def auc_over_bound(self) -> str:
        """Returns plots of the AUC with row caches less that without over the bound, of jobs with many bounds."""
        text = ""
        for kind, x_label in (("drift", "max_row_drift, learning rates"), ("lag", "max_row_lag, share 1/4")):
            series: dict[str, list[tuple[float, float]]] = {}
            for run in self.ways("het_auc"):
                points = [
                    (float(case.split()[1].rstrip(",")), -float(np.median(losses)))
                    for case in run["rounds"][0]
                    if case.startswith(kind) and not case.endswith("no share")
                    for losses in [[each[case]["loss_of_auc"] for each in run["rounds"] if case in each]]
                ]
                if len(points) > 2:
                    series[way_of("het_auc", run)] = sorted(points)
            text += self._curves(f"het-auc-{kind}.svg", "AUC less that without a cache", x_label, series)
        return text

    def auc_curves(self) -> str:
        """Returns a plot for each network of AUC over the seconds of training, of the last round."""
        text = ""
        for run in self.ways("het_link"):
            series = {bound: of["curve"] for bound, of in run["rounds"][-1].items()}
            options = options_of(run)
            name = "-".join(str(options[each]) for each in WAYS["het_link"] if each in options)
            title = f"AUC, {way_of('het_link', run)}"
            text += self._curves(f"het-link-{name}.svg", "AUC", "s of training", series, title)
        return text

    def _curves(
        self,
        file: str,
        y_label: str,
        x_label: str,
        series: Mapping[str, Sequence[tuple[float, float]]],
        title: str = "",
    ) -> str:
        title = title or y_label
        scales = {"is_logarithmic": x_label != "s of training", "begins_at_0": not y_label.startswith("AUC")}
        return self._plot(file, title, plots.lines(title, x_label, y_label, series, **scales)) if series else ""

    def floors(self) -> str:
        """Returns the floor's examples a second over the baseline's, which no parameter server can exceed."""
        told = []
        for name in ("step", "lookup"):
            for run in self.ways(name):
                rounds = [each for each in run["rounds"] if PADDLE in each]  # some of the pooled runs may lack it
                if rounds:
                    ratio = step_ratio(PADDLE, FLOOR)({"rounds": rounds}).value
                    told.append(f"{ratio:.2f} in {name}, {way_of(name, run)}")
        return "; ".join(told) or "not measured"

    def over_plain(self) -> str:
        """Returns the range of examples a second over plain Paddle's, by number of workers."""
        medians: dict[str, list[float]] = {}
        for run in self.ways("cluster"):
            for case in run["rounds"][0]:
                if len(values := cell_values(COLUMNS["cluster"][1], run, case)):
                    medians.setdefault(case.split(", ")[1].split(" ")[0], []).append(float(np.median(values)))
        return (
            ", ".join(f"{min(each):.2f} to {max(each):.2f} with {n}" for n, each in medians.items()) or "not measured"
        )

    def two_workers(self) -> str:
        """Returns the CPU of a step with two workers over that with one, by job."""
        ratios = [two_workers(run) for run in self.ways("cluster")]
        return "; ".join(f"{name}: {each.value:.2f}" for of in ratios for name, each in of.items()) or "not measured"

    def calls(self) -> str:
        """Returns a table of the Python and C calls of the ops of a step, and of the system calls of a step."""
        rows = []
        for run in self.ways("parts"):
            of_system = {
                f"system calls, {program}, {part}": f"{sum(calls.values()):.0f}"
                for program, parts in run.get("system_calls", {}).items()
                for part, calls in parts.items()
                if calls
            }
            of_ops = {
                f"Python and C calls, {op}": " + ".join(map(str, calls)) for op, calls in run.get("calls", {}).items()
            }
            rows += [(f"{way_of('parts', run)}: {what}", told) for what, told in (of_ops | of_system).items()]
        return table(("", "a step"), rows)

    def of_paddle(self) -> Iterator[Run]:
        """Yields what PaddlePaddle 2.6.2 took to save and load, in every run that measured it."""
        return (run["peer"] for run in recorded(self._results, "snapshot") if run["peer"])

    def _plot(self, file: str, title: str, svg: str) -> str:
        self.plots[f"{PLOTS}/{file}"] = svg
        return picture(file, title)


def by_case(run: Run, each: Round) -> Round:
    """Returns the measurements of a round by case: a stretch of growth and a part of a step are cases."""
    if run["benchmark"] == "snapshot":
        units = ((name, next((unit for unit in ("bytes", "count", "ms") if unit in name), "s")) for name in each)
        return {name: {unit: each[name]} for name, unit in units if unit != "count"}
    if run["benchmark"] == "growth":
        return {f"{way}, {s['num_rows'] / MEGA:.3g} M rows": s for way, of in each.items() for s in of["stretches"]}
    if run["benchmark"] == "parts":
        steps = {program: of["parts"] for program, of in each.items() if of.get("parts")}
        parts = {f"{name}: {part}": [step[part] for step in of] for name, of in steps.items() for part in of[0]}
        return parts | {f"{program}: the step": of["seconds"] for program, of in each.items()}
    if run["benchmark"] == "het_traffic":
        return {case: of for case, of in each.items() if not case.startswith("simulated, ")}  # those are plotted
    if run["benchmark"] == "spread":
        return {case: of for case, of in each.items() if floor_name(case) in each}
    return {case: of for case, of in each.items() if case != "this"}


def cell_values(column: Column, run: Run, case: str) -> Any:
    """Returns the values of a case in all rounds; none where it does not have them."""
    found = []
    for each in run["rounds"]:
        try:
            found.append(np.atleast_1d(column.values(Cell(run, {**each, **by_case(run, each)}, case))))
        except (KeyError, TypeError):
            continue
    return np.concatenate(found) if found else np.array([])


def state(verdict: Verdict) -> str:
    """Returns what became of a goal: `reached`, `missed`, `inapplicable` or `unmeasured`."""
    if verdict.why_not:
        return "inapplicable"
    if not verdict.figure:
        return "unmeasured"
    return "reached" if verdict.is_reached else "missed"


def goal_cells(verdict: Verdict) -> Sequence[str]:
    """Returns the row of a goal."""
    goal, figure, run = verdict.goal, verdict.figure, verdict.run
    bound = f"at {'most' if goal.is_upper else 'least'} {verdict.bound:g} {goal.unit}".rstrip()
    if figure is None or run is None:
        measured = f"does not apply: {verdict.why_not}" if verdict.why_not else "not measured yet"
        return goal.name, bound, measured, "", goal.baseline, goal.differs, source(run) if run else ""
    low, high = figure.quartiles
    quartiles = f" ({low:.{goal.digits}f} - {high:.{goal.digits}f})" if len(figure.of_rounds) > 1 else ""
    value = f"{figure.value:.{goal.digits}f}" if np.isfinite(figure.value) else "never reached"
    measured = f"{value} {goal.unit}".rstrip() + quartiles
    reached = ("yes" if verdict.is_reached else "no") + (", within noise" if verdict.is_within_noise else "")
    return goal.name, bound, measured, reached, figure.baseline or goal.baseline, goal.differs, source(run)


def way_of(name: str, run: Run) -> str:
    """Returns how a run was made: the options in `WAYS` that are set."""
    options = {option: options_of(run).get(option) for option in WAYS.get(name, ())}
    told = {"max_step_lag": "max_step_lag {}", "serial": "serial", "mkl_avx2": "MKL with AVX2"}
    told |= {"workers": "{} workers", "rate": "{} Mbit/s", "dim": "dim {}", "dense": "dense values beside {}"}
    told |= {"examples": "{} examples", "pservers": "pservers for rows: {}"}
    values = {
        option: " ".join(map(str, np.atleast_1d(value))) for option, value in options.items() if value is not None
    }
    return ", ".join(told.get(option, "{}").format(value) for option, value in values.items())


def source(run: Run) -> str:
    """Returns the commits of pooled runs, how many runs there are and their rounds, the processor, and the network."""
    commits = " and ".join(dict.fromkeys(each["commit"] or "no commit known" for each in run["runs"]))
    makers = " and ".join(dict.fromkeys(each["machine"]["cpu"].split()[0].split("(")[0] for each in run["runs"]))
    changed = " with changes" if any(each["is_dirty"] for each in run["runs"]) else ""
    runs = ", ".join(f"{len(run[key])} {key[: None if len(run[key]) > 1 else -1]}" for key in ("runs", "rounds"))
    links = dict.fromkeys(f", {each['link']}" for each in run["runs"] if "link" in each)
    return f"{commits}{changed}, {runs}, {makers}{' and'.join(links)}"


def machine(run: Run) -> str:
    """Returns a sentence on the machine of a run and its software."""
    told = run["machine"]
    packages = ", ".join(f"{name} {told['packages'].get(name, '-')}" for name in ("paddlepaddle", "numpy", "numba"))
    cpu = f"{told['cpu']}, {told['cores']} cores, {told['memory_bytes'] / GB:.0f} GB"
    return f"{cpu}, Linux {told['kernel'].split('-')[0]}, Python {told['python']}, {packages}."


def table(heading: Sequence[Any], rows: Iterable[Sequence[Any]]) -> str:
    """Returns a markdown table."""
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in [heading, ["---"] * len(heading), *rows])


def picture(file: str, title: str) -> str:
    """Returns the markdown of a plot."""
    return f"\n![{title}]({PLOTS}/{file})\n"


def spread(values: Any, digits: int) -> str:
    """Returns the median, and the quartiles if there are several values; empty if there is none.

    Infinity is a time in which something was not reached.
    """
    if not len(values):
        return ""
    quartiles = np.percentile(values, [25, 50, 75], method="linear" if np.isfinite(values).all() else "nearest")
    low, middle, high = (
        f"{each + 0.0:.{digits}f}" if np.isfinite(each) else "not reached"  # -0.0 is 0.0
        for each in quartiles
    )
    return middle + (f" ({low} - {high})" if len(values) > 1 else "")
