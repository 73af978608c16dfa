"""Measures: the figure of a goal, computed from the rounds of pooled runs. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks import calibration
from benchmarks.het.dense_link import BESIDE
from benchmarks.programs import (
    AHEAD,
    CACHED,
    FLOOR,
    OURS,
    PADDLE,
    PLAIN_TCP,
    TLS,
    behind_name,
    floor_name,
)
from benchmarks.record import Run
from fleet_sparse.tools.capacity.coefficients import shipped_coefficients

MS, MEGA = 1e-3, 1e6
MODEL_TOLERANCE = 0.2
SYNC_COMMIT, SYNC_PSERVERS_MS = "8959b3c", 5.98  # the median that `cluster.jsonl` has of it, sync, 2 x 2
WIRE = "over the wire"
MOST_MBIT_PER_S = 1000
"""Fastest link that counts for `worst_time_to_auc`."""
CELLS = ("model", "rate", "dim", "workers", "pservers", "dense", "examples")
"""Options by which the jobs of `het_link` are told apart."""
LOST_BY_A_COUNT = 0.01
"""AUC from which on a bound in updates alone is said to fail."""

Round = Mapping[str, Any]
Measure = Callable[[Run], "Figure | NotApplicable | None"]


class Figure(NamedTuple):
    """A figure, the same of each round, and the baseline's figure in the same runs as text."""

    value: float
    of_rounds: Sequence[float]
    baseline: str = ""

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and third quartile of the rounds; the extremes if one is infinite."""
        if not np.isfinite(self.of_rounds).all():
            return float(np.min(self.of_rounds)), float(np.max(self.of_rounds))
        low, high = np.percentile(self.of_rounds, [25, 75])
        return float(low), float(high)


class NotApplicable(NamedTuple):
    """The reason why a goal does not apply to a run; its measure returns it in place of a figure."""

    why: str


def by_round(of_round: Callable[[Round], float]) -> Callable[[Run], Figure]:
    """Returns the measure that is the median over rounds of a value of each round."""

    def measure(run: Run) -> Figure:
        values = [float(of_round(each)) for each in run["rounds"]]
        return Figure(float(np.median(values)), values)

    return measure


def median_s(rounds: Sequence[Round], program: str) -> float:
    """Returns the median over all steps of a program."""
    return float(np.median(np.concatenate([each[program]["seconds"] for each in rounds])))


def step_ratio(program: str, base: str) -> Callable[[Run], Figure]:
    """Returns the measure of a program's median step over another one's."""
    return by_round(lambda each: median_s([each], program) / median_s([each], base))


def step_with(mode: str, durability: str) -> Callable[[Round], float]:
    """Returns the measure of a step with a durability over one without any."""
    return lambda each: each[f"{mode}, {durability}"]["seconds"] / each[f"{mode}, none"]["seconds"]


def ahead_over_plain(run: Run) -> Figure | None:
    """Returns the step looking ahead over the plain step; None if it was not measured."""
    return step_ratio(AHEAD, OURS)(run) if all(AHEAD in each for each in run["rounds"]) else None


def cached_over_plain(run: Run) -> Figure | None:
    """Returns the step with a row cache over the step without; None if it was not measured."""
    rounds = [each for each in run["rounds"] if CACHED in each]
    return step_ratio(CACHED, OURS)({"rounds": rounds}) if rounds else None


def saved_bytes(case: str) -> Callable[[Run], Figure]:
    """Returns the measure of the percentage of bytes that row caches save with dim 64, beside the simulated one."""

    def measure(run: Run) -> Figure:
        simulated = 100 * float(np.median([each[f"{case}, simulated"]["dim 64"] for each in run["rounds"]]))
        return by_round(lambda each: 100 * each[case]["dim 64"])(run)._replace(baseline=f"simulated: {simulated:.1f} %")

    return measure


def saved_over_simulated(key: str) -> Callable[[Run], Figure | None]:
    """Returns the measure of the bytes that row caches save over the simulated ones, of the job where that is least."""

    def of_job(job: str) -> Callable[[Run], Figure]:
        return by_round(lambda each: each[job][key])

    def measure(run: Run) -> Figure | None:
        jobs = [case for case, of in run["rounds"][0].items() if case.startswith("measured, ") and key in of]
        return min((of_job(job)(run) for job in jobs), default=None)

    return measure


def of_bound(bound: str, measure: Callable[[Mapping[str, float]], float]) -> Callable[[Run], Figure | None]:
    """Returns the measure of what a job with row caches of a bound gave; None if no round has it."""

    def measured(run: Run) -> Figure | None:
        rounds = [each for each in run["rounds"] if bound in each]
        return by_round(lambda each: measure(each[bound]))({"rounds": rounds}) if rounds else None

    return measured


def auc_where_a_count_fails(run: Run) -> Figure | NotApplicable | None:
    """Returns the AUC with a drift less that without a cache, where a bound in updates alone loses 0.01."""
    lost = of_bound("lag 100, no share", lambda each: each["loss_of_auc"])(run)
    if lost is None:
        return None
    if lost.value < LOST_BY_A_COUNT:
        return NotApplicable(f"a lag of 100 alone gives {-lost.value:+.4f}")
    return of_bound("drift 2 x rate", lambda each: -each["loss_of_auc"])(run)


def time_to_auc(run: Run) -> Figure:
    """Returns the seconds until a model reached its AUC with row caches over those without; infinity if it did not."""

    def ratio(of_round: Round) -> float:
        cached, plain = of_round["drift 2 x rate"], of_round["no cache"]
        return float(cached["s_to_target"] / plain["s_to_target"]) if cached["has_reached"] else math.inf

    return by_round(ratio)(run)


def worst_time_to_auc(run: Run) -> Figure | None:
    """Returns the same of the network and dim where row caches help least; None if only one was measured.

    Runs on networks of more than 1 Gbit/s show how long the jobs take on the cores alone, and do not count.
    """
    cells: dict[tuple[Any, ...], list[Round]] = {}
    for each in run["runs"]:
        cell = tuple(each["options"].get(name) for name in CELLS)
        if each["options"]["rate"] <= MOST_MBIT_PER_S:
            cells.setdefault(cell, []).extend(each["rounds"])
    figures = [time_to_auc({"rounds": rounds}) for rounds in cells.values()]
    return max(figures, key=lambda figure: figure.value) if len(figures) > 1 else None


def over_ring(run: Run) -> Figure | None:
    """Returns the bytes of the busiest link over a ring's, dense ranges beside the workers; the worst job."""
    ratios = [of["over_ring"] for each in run["rounds"] for case, of in each.items() if case.endswith(BESIDE)]
    return Figure(max(ratios), ratios) if ratios else None


def waited(rows: str) -> Callable[[Run], Figure]:
    """Returns the measure of the seconds that a save keeps workers from training."""
    return by_round(lambda each: each[rows]["waited_s"])


def over_link(link: str) -> Callable[[Run], Figure | None]:
    """Returns the measure of a step looking ahead, behind a link, over the floor; None if that link was left out."""
    ahead, theirs = behind_name(AHEAD, link), behind_name(PADDLE, link)

    def measure(run: Run) -> Figure | None:
        rounds = [each for each in run["rounds"] if ahead in each]
        if not rounds:
            return None
        told = [each for each in rounds if theirs in each]
        baseline = f"{PADDLE}: {step_ratio(theirs, FLOOR)({'rounds': told}).value:.2f}" if told else ""
        return step_ratio(ahead, FLOOR)({"rounds": rounds})._replace(baseline=baseline)

    return measure


def cpu_over_floor(part: str) -> Callable[[Run], Figure]:
    """Returns the measure of CPU ms of a step less the floor's, of `worker` or `pservers`."""

    def cpu_ms(of_program: Round) -> float:
        return float(of_program[f"{part}_cpu_s"] / len(of_program["seconds"]) / MS)

    return by_round(lambda each: cpu_ms(each[OURS]) - cpu_ms(each[FLOOR]))


def shape_over_floor(of_round: Round, shape: str) -> float:
    """Returns the median step of a shape over that of its floor in a round."""
    return float(np.median(of_round[shape]["seconds"]) / np.median(of_round[floor_name(shape)]["seconds"]))


def worst_shape(run: Run) -> Figure:
    """Returns the shape with the largest median over rounds of its step over its floor."""

    def over_floor(shape: str) -> Figure:
        return by_round(lambda each: shape_over_floor(each, shape))(run)

    return max(over_floor(name) for name in run["rounds"][0] if floor_name(name) in run["rounds"][0])


def two_workers(run: Run) -> dict[str, Figure]:
    """Returns, by job of two workers, the CPU of a step over that of the same job of one.

    The two jobs are not interleaved, so the figure is a ratio of medians.
    """
    found = {}
    for two, one in ((name, name.replace(", 2 x ", ", 1 x ")) for name in run["rounds"][0] if ", 2 x " in name):
        if "plain" not in two and one in run["rounds"][0]:
            ours, base = (np.array([job_cpu_ms(each[name]) for each in run["rounds"]]) for name in (two, one))
            found[two] = Figure(float(np.median(ours) / np.median(base)), (ours / base).tolist())
    return found


def worst_two_workers(run: Run) -> Figure | None:
    """Returns the job of two workers with the largest ratio; None if there is none."""
    return max(two_workers(run).values(), default=None)


def sync_pservers(run: Run) -> Figure | None:
    """Returns the CPU of the pservers for a step of two workers in sync over that of `SYNC_COMMIT`."""
    name = "sync, 2 x 2"
    if name not in run["rounds"][0]:
        return None
    return by_round(lambda each: each[name]["pservers_ms"] / SYNC_PSERVERS_MS)(run)


def num_calls(run: Run) -> Figure:
    """Returns the number of Python and C calls of both ops of a step. They are counted once in a run."""
    number = float(sum(map(sum, run["calls"].values())))
    return Figure(number, [number])


def job_cpu_ms(of_job: Mapping[str, float]) -> float:
    """Returns the CPU of a step of one worker and of all pservers for it."""
    return of_job["worker_ms"] + of_job["pservers_ms"]


def client_rate(name: str, cycle: str) -> Callable[[Run], Figure]:
    """Returns the measure of M rows/s over all cycles of a kind, `whole` or `combined`."""

    def measure(run: Run) -> Figure:
        rows, of_rounds = run["options"]["batch"] / MEGA, [each[name][cycle] for each in run["rounds"]]
        of_all = rows / float(np.median(np.concatenate(of_rounds)))
        return Figure(of_all, [rows / float(np.median(each)) for each in of_rounds])

    return measure


def slowest_stretch(way: str) -> Callable[[Run], Figure]:
    """Returns the measure of M rows/s of the stretch whose median over rounds is the lowest."""

    def measure(run: Run) -> Figure:
        rates = np.array([[each["rows_per_s"] / MEGA for each in of[way]["stretches"]] for of in run["rounds"]])
        medians = np.median(rates, axis=0)
        return Figure(float(medians.min()), rates[:, medians.argmin()].tolist())

    return measure


def largest(way: str, key: str) -> Callable[[Run], Figure]:
    """Returns the measure of the largest value of all stretches of all rounds."""
    of_rounds = by_round(lambda each: max(stretch[key] for stretch in each[way]["stretches"]))
    return lambda run: of_rounds(run)._replace(value=max(of_rounds(run).of_rounds))


def bytes_at(num_rows: int) -> Callable[[Run], Figure]:
    """Returns the measure of bytes a row when a pserver's table first has so many rows."""
    return by_round(lambda each: next(s["bytes_a_row"] for s in each[WIRE]["stretches"] if s["num_rows"] >= num_rows))


def snapshot(name: str, base: str = "", peer: str = "") -> Callable[[Run], Figure]:
    """Returns the measure of seconds, or of their ratio to `base`; `peer` names the baseline's seconds."""
    of_rounds = by_round(lambda each: each[name] / (each[base] if base else 1))
    return lambda run: of_rounds(run)._replace(
        baseline=f"{PADDLE}: {run['peer'][peer]:.0f} s" if peer and run["peer"] else ""
    )


def process(key: str, unit: float, suffix: str) -> Callable[[Run], Figure]:
    """Returns the measure of a pserver process, beside a server of PaddlePaddle 2.6.2."""

    def measure(run: Run) -> Figure:
        theirs = [each[f"{PADDLE}, a server"][key] / unit for each in run["rounds"] if f"{PADDLE}, a server" in each]
        ours = by_round(lambda each: each["pserver"][key] / unit)(run)
        return ours._replace(baseline=f"{PADDLE}: {np.median(theirs):.3g} {suffix}" if theirs else "")

    return measure


def hit(distribution: str, value: Callable[[Mapping[str, float], int], float]) -> Measure:
    """Returns the measure of hits of a row cache, from the times of a round and the number of rows of a batch."""

    def measure(run: Run) -> Figure | None:
        name = f"find, lease and touch, {distribution}"
        found = [(case, each["batch"]) for case, each in run["cases"].items() if each["kernel"] == name]
        return None if not found else by_round(lambda each: value(each[found[0][0]], found[0][1]))(run)

    return measure


def of_reads(case: str, key: str, *, belady: bool) -> Measure:
    """Returns the measure of the percentage of reads that miss, or whose row enters; `belady` adds that of Belady's."""
    optimal = f"{case.split(':', maxsplit=1)[0]}: Belady"

    def measure(run: Run) -> Figure:
        least = 100 * float(np.median([each[optimal][key] for each in run["rounds"]]))
        return by_round(lambda each: 100 * each[case][key])(run)._replace(baseline=f"Belady: {least:.1f}" * belady)

    return measure


def misses_after_a_move(run: Run) -> Figure:
    """Returns the percentage of reads that miss in the cache, less that of the better one that begins anew."""

    def points(of_round: Round) -> float:
        ours, *others = (
            float(of_round[f"hot set moved: {name}"]["missed"])
            for name in ("aged LFU", "LRU begun anew", "LFU begun anew")
        )
        return 100 * (ours - min(others))

    return by_round(points)(run)


def misses_over_the_best_policy(run: Run) -> Figure | None:
    """Returns the percentage of reads that miss in a cache of 15 % of the rows, less that of the best other policy."""
    ours, *others = (f"15 %: {name}" for name in ("aged LFU", "aged LFU, second", "LFU, all", "LRU, all"))
    if any(ours not in each for each in run["rounds"]):
        return None
    return by_round(lambda each: 100 * (each[ours]["missed"] - min(each[other]["missed"] for other in others)))(run)


def find_and_gather(run: Run) -> Figure:
    """Returns the rate over that of random lines, in the largest table of dim 16."""
    cases = {name: each["num_rows"] for name, each in run["cases"].items() if each["kernel"] == "find and gather"}
    name = max((name for name in cases if run["cases"][name]["dim"] == 16), key=lambda name: cases[name])
    return by_round(lambda each: each[name]["limit"] / each[name]["ours"])(run)


def cases_within(run: Run) -> Figure:
    """Returns the percentage of measured cases that the capacity model, fitted to these runs, predicts to 20 %."""
    shipped = shipped_coefficients()
    coefficients = calibration.fitted(run["runs"], shipped.pull_ns, shipped.push_ns, shipped.pserver_bytes)
    ratios = [calibration.ratio(case, coefficients) for case in calibration.cases_of(run["runs"])]
    share = 100 * float(np.mean(np.abs(np.array(ratios) - 1) <= MODEL_TOLERANCE))
    return Figure(share, [share])


def against(part: str) -> Callable[[Run], Figure]:
    """Returns the measure of this commit's value over the older commit's."""
    return by_round(lambda each: np.median(each["this"][part]) / np.median(each["against"][part]))


def served(run: Run, name: str, batches: Sequence[int], of_case: Callable[[Round, str], float]) -> Figure | None:
    """Returns the largest value of all cases of serving with this name and one of these batches.

    Args:
        run: A run of `serving`.
        name: The contender, as the benchmark names it.
        batches: Batches that count.
        of_case: Returns the value of a round, from the round and the case without the contender's name.
    """
    ends = tuple(f"batch {batch}: {name}" for batch in batches)

    def measured(case: str) -> Figure:
        return by_round(lambda each: of_case(each, case))(run)

    return max((measured(case.removesuffix(name)) for case in run["rounds"][0] if case.endswith(ends)), default=None)


def served_ratio(name: str, base: str, batches: Sequence[int], key: str) -> Measure:
    """Returns the measure of a contender's CPU time, or median, over that of another one; of the worst case."""

    def of_case(each: Round, case: str) -> float:
        ours, theirs = (np.median(each[f"{case}{which}"][key]) for which in (name, base))
        return float(ours / theirs)

    return lambda run: served(run, name, batches, of_case)


def served_ms(name: str, batch: int) -> Measure:
    """Returns the measure of the median ms of a contender; of the worst case."""
    return lambda run: served(
        run, name, (batch,), lambda each, case: 1e3 * float(np.median(each[f"{case}{name}"]["seconds"]))
    )


def service(name: str, of_case: Callable[[Any], float]) -> Measure:
    """Returns the measure of a case that was measured at the largest number of rows."""

    def measure(run: Run) -> Figure | None:
        found = [case for case in run["rounds"][0] if case.endswith(f": {name}")]
        return by_round(lambda each: of_case(each[found[0]]))(run) if found else None

    return measure


def bytes_of_more_rows(run: Run) -> Figure | None:
    """Returns the memory of a read-only pserver with most rows less that of one with fewest, for each row of these."""
    cases = {float(case.split(" ")[0]) * MEGA: case for case in run["rounds"][0] if case.endswith(" rows: pserver")}
    few, many = min(cases), max(cases)
    return by_round(
        lambda each: (each[cases[many]]["resident_bytes"] - each[cases[few]]["resident_bytes"]) / (many - few)
    )(run)


def p99_under_deltas(run: Run) -> Figure | None:
    """Returns the p99 of reads during deltas over that without."""
    (rows,) = {case.split(":")[0] for case in run["rounds"][0] if case.endswith(": reads with deltas")} or {""}

    def p99(of_round: Round, name: str) -> float:
        return float(np.percentile(of_round[f"{rows}: {name}"]["seconds"], 99))

    return by_round(lambda each: p99(each, "reads with deltas") / p99(each, "reads without deltas"))(run)


def more_to_register(run: Run) -> Figure:
    """Returns the ms of a registration with keys less those of one without."""

    def ms(of_round: Round, name: str) -> float:
        return float(np.median(of_round[name]["register_s"]) / MS)

    return by_round(lambda each: ms(each, TLS) - ms(each, PLAIN_TCP))(run)
