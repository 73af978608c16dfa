"""docs/benchmarks.md: what people wrote, `benchmarks/page.md`, with tables and plots of the newest results.

In the text a block begins with a line `<!-- name -->` and ends with `<!-- end -->`. Where a run of the benchmark is
recorded the block of that name in `BLOCKS` takes the place of what stands there; otherwise that stays.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import figures
from benchmarks.contenders import AHEAD, FLOOR, OF_PADDLE, OURS, PADDLE
from benchmarks.record import RESULTS, ROOT, recorded
from fleet_sparse import plot

TEXT = ROOT / "benchmarks" / "page.md"
DOCS = ROOT / "docs"
PLOTS = "plots"
_BLOCK = re.compile(r"^<!-- ([\w-]+) -->\n(.*?)^<!-- end -->\n", re.M | re.S)
_WRITTEN = "<!-- Written by `scripts/bench --page` from `benchmarks/page.md` and `benchmarks/results`. -->\n\n"
LINE_LENGTH = 120
MODES = ("async", "sync", "geo")
WAYS_TO_STEP = ("mode", "max_step_lag", "channel", "serial", "mkl_avx2")
"""Options of which each combination has a run of its own."""
PROGRAM = "Paddle, over the floor"
CYCLES = ("pull", "push", "whole", "combined")
MODEL_TOLERANCE = 0.2
MS, US, MB, GB = 1e3, 1e6, 1e6, 1e9
MINUTE_S = 60

Run = dict[str, Any]
"""A recorded run."""


class Block(NamedTuple):
    """What takes the place of a block.

    Attributes:
        text: Markdown, which ends with a line end.
        plots: SVG by file name.
    """

    text: str
    plots: dict[str, str]


def write(results: Path = RESULTS, docs: Path = DOCS) -> None:
    """Writes the page and its plots."""
    for name, content in files(results).items():
        path = docs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")


def files(results: Path) -> dict[str, str]:
    """The page and its plots, by path beneath `docs`."""
    plots: dict[str, str] = {}

    def replaced(found: re.Match[str]) -> str:
        block = BLOCKS[found[1]](results)
        if block is None:
            return found[2]
        plots.update({f"{PLOTS}/{name}": svg for name, svg in block.plots.items()})
        return block.text

    page = _BLOCK.sub(replaced, TEXT.read_text(encoding="utf-8"))
    return {"benchmarks.md": _WRITTEN + page, **plots}


def of_run(
    name: str, block_of: Callable[[Run], Block], fits: Callable[[dict[str, Any]], bool] = lambda options: True
) -> Callable[[Path], Block | None]:
    """A block made of the newest run of a benchmark whose options fit."""

    def block(results: Path) -> Block | None:
        runs = [run for run in recorded(results, name) if fits(run["options"])]
        return block_of(runs[-1]) if runs else None

    return block


def start(run: Run) -> Block:
    """Time until ready and idle memory of processes."""
    rows = []
    for name in run["rounds"][0]:
        found = [of_round[name] for of_round in run["rounds"] if name in of_round]
        seconds = spread([each["seconds"] for each in found], 2)
        rows.append((name, seconds, spread([each["resident_bytes"] / MB for each in found], 0)))
    return Block(about(run) + table(("one process", "s until ready", "MB resident"), rows), {})


def kernels(run: Run) -> Block:
    """A table of each number of rows: kernels by dim."""
    cases, rounds = run["cases"], run["rounds"]
    dims = sorted({case["dim"] for case in cases.values() if case["dim"]})
    asked = run["options"]["rows"]
    text = about(run)
    for num_rows in asked:
        cells: dict[str, dict[int, str]] = {}
        for name, case in cases.items():
            if case["kernel"] in {"dedup", "merge"} or nearest(case["num_rows"], asked) != num_rows:
                continue
            ratio = np.median([each[name]["limit"] / each[name]["ours"] for each in rounds])
            rate = case["batch"] / np.median([each[name]["ours"] for each in rounds]) / 1e6
            fewer = "" if case["num_rows"] >= num_rows else f", {case['num_rows'] / 1e6:.1f} M rows"
            cells.setdefault(case["kernel"], {})[case["dim"]] = f"{ratio:.2f} ({rate:.1f}{fewer})"
        heading = (f"{grouped(num_rows)} rows", "index only", *(f"dim {dim}" for dim in dims))
        rows = [(kernel, *(of_dims.get(dim, "") for dim in (0, *dims))) for kernel, of_dims in cells.items()]
        text += table(heading, rows) + "\n"
    beside = []
    for name, case in cases.items():
        others = [other for other in ("memcpy", "NumPy") if other in rounds[0][name]]
        if not others:
            continue
        ratios = [
            spread([each[name][other] / each[name]["ours"] for each in rounds], 2) if other in others else ""
            for other in ("memcpy", "NumPy")
        ]
        beside.append((case["kernel"], short_rows(case["num_rows"]), case["dim"] or "", *ratios))
    return Block(text + table(("kernel", "rows", "dim", "memcpy / ours", "NumPy / ours"), beside), {})


def client(run: Run) -> Block:
    """Times of both kinds of cycles, by number of shards and channel."""
    rows, bars_ = [], []
    batch = run["options"]["batch"]
    for name in run["rounds"][0]:
        times = {part: joined(each[name][part] for each in run["rounds"]) for part in ("dedup", *CYCLES)}
        rates = {part: batch / times[part] / 1e6 for part in ("whole", "combined")}
        sustained = batch / np.median(times["dedup"] + times["whole"]) / 1e6
        kilobytes = np.mean([each[name]["num_bytes"] for each in run["rounds"]]) / 1e3
        goals = {part: str(figures.CLIENT_GOALS.get((name, part), "")).removesuffix(" M rows/s") for part in rates}
        middle = {part: f"{np.median(each):.2f}" for part, each in rates.items()}
        rows.append(
            (
                name,
                *(f"{np.median(times[part]) * US:.0f}" for part in ("dedup", "pull", "push")),
                *(spread(times["whole"] * US, 0), middle["whole"], goals["whole"], f"{sustained:.2f}"),
                *(spread(times["combined"] * US, 0), middle["combined"], goals["combined"]),
                f"{kilobytes:.0f}",
            )
        )
        for part, rate in rates.items():
            what = ", combined" if part == "combined" else ""
            bars_.append(plot.Bar(f"{name}{what}", *np.percentile(rate, [25, 50, 75]).tolist()))
    headings = (
        "shards, channel|distinct ids us|pull us|push us|cycle us (quartiles)|M rows/s|goal|M rows/s with distinct ids|"
        "combined us (quartiles)|combined M rows/s|combined goal|kB a cycle"
    )
    svg = plot.bars("Rows that one client pulls and pushes a second", "M rows/s", bars_)
    text = about(run) + table(headings.split("|"), rows)
    return Block(text + picture("client.svg", "rows a second"), {"client.svg": svg})


def lookup(results: Path) -> Block | None:
    """Steps of the lookup model, the newest run of each channel and way to run ops."""
    runs = newest_by(results, "lookup", WAYS_TO_STEP)
    if not runs:
        return None
    run = runs[0]
    ids = f"{grouped(run['num_ids'])} ids, {grouped(run['num_distinct'])} of them distinct, a step. "
    what = "A step that only looks up, sums and pushes"
    return stepped(runs, "lookup.svg", what, ids, in_ms=True)


def step(results: Path) -> Block | None:
    """Steps of the click model, the newest run of each mode, channel and way to run ops."""
    runs = newest_by(results, "step", WAYS_TO_STEP)
    return stepped(runs, "step.svg", "A step of a click model over its floor", "", in_ms=False) if runs else None


def parts(results: Path) -> Block | None:
    """Where the time of a step goes: the newest run of each model and way to run ops."""
    runs = newest_by(results, "parts", (*WAYS_TO_STEP, "model"))
    text = ""
    for run in runs:
        text += about(run, f"{model_of(run)}: ")
        medians = medians_of_parts(run)
        rows = [
            (part, *(f"{of_parts[part] * MS:.2f}" for of_parts in medians.values()), "")
            for part in next(iter(medians.values()))
        ]
        whole = (f"{figures.median_s(run, name) * MS:.2f}" for name in (*medians, FLOOR))
        rows.append(("the step", *whole))
        text += table(("median ms", *medians, FLOOR), rows) + "\n"
    return Block(text, {}) if runs else None


def limits(results: Path) -> Block | None:
    """What each part of a step takes of the floor's: the newest run of each model and way to run ops."""
    columns: dict[str, dict[str, str]] = {}
    for run in newest_by(results, "parts", (*WAYS_TO_STEP, "model")):
        floor = figures.median_s(run, FLOOR)
        for name, of_parts in medians_of_parts(run).items():
            more = sum(of_parts[part] for part in OF_PADDLE) - floor
            ours = {part: seconds for part, seconds in of_parts.items() if part not in OF_PADDLE}
            cells = {part: f"{100 * seconds / floor:.1f}" for part, seconds in {**ours, PROGRAM: more}.items()}
            step_ = {"the step": f"{100 * figures.median_s(run, name) / floor:.1f}"}
            looking = ", looking ahead" if name == AHEAD else ""
            columns[f"{model_of(run)}{looking}"] = {"the floor": "100", **cells, **step_}
    if not columns:
        return None
    names = dict.fromkeys(name for cells in columns.values() for name in cells)
    rows = [(name, *(cells.get(name, "") for cells in columns.values())) for name in names]
    return Block(table(("% of the floor's step", *columns), rows) + floors_beside_peers(results), {})


def floors_beside_peers(results: Path) -> str:
    """What is the most that any parameter server could make of the models, where runs with the peer say it."""
    told = []
    for name, model in (("step", "click model"), ("lookup", "lookup model")):
        for run in newest_by(results, name, WAYS_TO_STEP):
            if run["options"].get("peer"):
                ratio = figures.ratios(run, PADDLE, FLOOR).value
                told.append(f"{ratio:.2f} in the {model}, {where_of(run['options'])}")
    if not told:
        return ""
    sentence = f"The floor over the peer, in examples a second: {'; '.join(told)}. Pservers can only add to the floor."
    return "\n" + textwrap.fill(sentence, LINE_LENGTH) + "\n"


def medians_of_parts(run: Run) -> dict[str, dict[str, float]]:
    """Median seconds of each part of a step, of all rounds, by contender that has parts."""
    found = {}
    for name in run["rounds"][0]:
        steps = [each for of_round in run["rounds"] for each in of_round[name]["parts"]]
        if steps:
            found[name] = {part: float(np.median([each[part] for each in steps])) for part in steps[0]}
    return found


def model_of(run: Run) -> str:
    """The model of a run of the parts, and how its steps were made."""
    return f"{run['options']['model']} model, {where_of(run['options'])}"


def local(run: Run) -> Block:
    """Lookup and update in one process, by rule, dim and library."""
    rows, bars_ = [], []
    names = list(next(iter(run["rounds"][0].values())))
    for case in run["rounds"][0]:
        times = {name: joined(each[case][name] for each in run["rounds"]) * MS for name in names}
        ours = np.median(times[names[0]])
        others = (f"{spread(times[name], 2)}, {np.median(times[name]) / ours:.1f}" for name in names[1:])
        rows.append((case, spread(times[names[0]], 2), *others))
        bars_ += [
            plot.Bar(f"{case}: {name}", *np.percentile(times[name], [25, 50, 75]).tolist())
            for name in names
            if case.endswith("dim 16")
        ]
    heading = ("ms a cycle (quartiles)", names[0], *(f"{name}, times ours" for name in names[1:]))
    if not bars_:
        return Block(about(run) + table(heading, rows), {})
    svg = plot.bars("Lookup and update of rows in one process", "ms", bars_)
    return Block(about(run) + table(heading, rows) + picture("local.svg", "ms a cycle"), {"local.svg": svg})


def cluster(run: Run) -> Block:
    """More workers and pservers on the same cores, over as many trainers of plain Paddle."""
    rounds = run["rounds"]
    rows: list[tuple[str, ...]] = []
    bars_: dict[str, list[plot.Bar]] = {}
    for name in rounds[0]:
        beside = f"{name.rpartition(' ')[0]} plain"
        rate, worker, pservers, others = (
            [each[name][what] for each in rounds] for what in ("examples_per_s", "worker_ms", "pservers_ms", "others")
        )
        faster = [each[name]["examples_per_s"] / each[beside]["examples_per_s"] for each in rounds]
        dearer = [figures.cpu_ms(each[name]) / figures.cpu_ms(each[beside]) for each in rounds]
        ratios = ("", "") if name == beside else (f"{np.median(faster):.2f}", f"{np.median(dearer):.2f}")
        costs = (spread(worker, 1), "" if name == beside else spread(pservers, 1), ratios[1])
        rows.append((name, grouped(np.median(rate)), ratios[0], *costs, f"{np.median(others):.1f}"))
        if name != beside:
            bar = plot.Bar(name, *np.percentile(faster, [25, 50, 75]).tolist())
            bars_.setdefault(name.split(",")[0], []).append(bar)
    headings = (
        "mode, workers x pservers|examples/s|examples/s over plain|worker CPU ms|pservers' CPU ms|"
        "CPU of both over plain|cores others used"
    )
    text = about(run) + table(headings.split("|"), rows) + "\n" + two_workers(run)
    title = "Examples a second of all workers, over plain Paddle's beside each other"
    svgs = {f"cluster-{mode}.svg": plot.bars(f"{title}: {mode}", "", of_mode) for mode, of_mode in bars_.items()}
    return Block(text + "".join(picture(name, name.removesuffix(".svg")) for name in svgs), svgs)


def two_workers(run: Run) -> str:
    """What a step of each of two workers costs of one's: a sentence."""
    ratios = [f"{name}: {ratio:.2f}" for name, ratio in figures.two_over_one(run).items()]
    told = "CPU of a step, of worker and pservers for it, with two workers over that with one: "
    return textwrap.fill(f"{told}{'; '.join(ratios)}.", LINE_LENGTH) + "\n" if ratios else ""


def scale(run: Run) -> Block:
    """The model of `fleet-sparse plan` beside what was measured, all at the speed of the median yardstick."""
    bars_ = []
    for check in run["checks"]:
        ratio = check["predicted_us"] / check["measured_us"]
        of_rounds = [each[check["name"]] for each in run["rounds"] if check["name"] in each]
        quietest = sorted(of_rounds, key=lambda each: float(each["others"]))[: max(check["rounds"], 1)]
        steps_s = [each["step_s"] * run["yardstick_s"] / each["yardstick_s"] for each in quietest]
        low, high = np.percentile(1e-6 * check["predicted_us"] / np.array(steps_s), [25, 75])
        bars_.append(plot.Bar(check["name"], min(float(low), ratio), ratio, max(float(high), ratio)))
    svg = plot.bars("A step by the model, over what was measured", "", bars_, mark=1.0)
    return Block(
        about(run) + within(run["checks"]) + picture("scale.svg", "the model over what was measured"),
        {"scale.svg": svg},
    )


def within(of_cases: Sequence[Mapping[str, Any]]) -> str:
    """How many cases the model tells to 20 %: a sentence."""
    counts = []
    for is_fitted in (True, False):
        ratios = np.array(
            [each["predicted_us"] / each["measured_us"] for each in of_cases if each["is_fitted"] == is_fitted]
        )
        found = int((abs(ratios - 1) <= MODEL_TOLERANCE).sum())
        counts.append(f"{found} of the {len(ratios)} {'fitted' if is_fitted else 'held-out'} cases")
    disturbed = sum(not each["rounds"] for each in of_cases)
    rest = f" Of {disturbed} cases no round was quiet." if disturbed else ""
    return textwrap.fill(f"The model is within 20 % of {' and '.join(counts)}.{rest}", LINE_LENGTH) + "\n"


def growth(run: Run) -> Block:
    """Rates, pauses and memory as a table grows."""
    rounds = run["rounds"]
    rows = []
    for way, number in ((each, number) for each in rounds[0] for number in range(len(rounds[0][each]["stretches"]))):
        found = [of_round[way]["stretches"][number] for of_round in rounds]
        rows.append(
            (
                f"{way}, {short_rows(found[0]['num_rows'])}",
                spread([each["rows_per_s"] / 1e6 for each in found], 1),
                spread([each["median_ms"] for each in found], 2),
                " ".join(f"{each['worst_ms']:.0f}" for each in found),
                spread([each["bytes_a_row"] for each in found], 1),
                f"{max(each['most_bytes_a_row'] for each in found):.1f}",
            )
        )
    heading = ("way, rows", "M rows/s", "median ms a batch", "worst ms, each round", "bytes/row", "most on the way")
    names = {
        f"{way}, round {number}": of_way["curve"]
        for number, of_round in enumerate(rounds, 1)
        for way, of_way in of_round.items()
    }
    rates = {name: [(rows, rate / 1e6) for rows, rate, _ in curve] for name, curve in names.items()}
    sizes = {name: [(rows, size) for rows, _, size in curve] for name, curve in names.items()}
    plots = {}
    if any(rates.values()):
        plots["growth-rate.svg"] = plot.lines("New rows a second", "rows there are", "M rows/s", rates)
        plots["growth-memory.svg"] = plot.lines("Memory of a row", "rows there are", "bytes", sizes)
    pictures = "".join(picture(name, name.removesuffix(".svg")) for name in plots)
    return Block(about(run, backed(run)) + table(heading, rows) + pictures, plots)


def backed(run: Run) -> str:
    """How fast the system backed memory before tables grew in it: a sentence; empty where nothing tried."""
    rates = [of_way["backed_bytes_per_s"] for of_round in run["rounds"] for of_way in of_round.values()]
    by_time = [np.array(each) / GB for each in zip(*rates, strict=True)]
    told = ", then ".join(f"{each.min():.1f} to {each.max():.1f}" for each in by_time)
    return f"Before each table as much memory was used and given back, at GB/s of {told}. " if told else ""


def snapshot(run: Run) -> Block:
    """Saving and loading, pushes during a save, and the peer."""
    rounds, options = run["rounds"], run["options"]
    num_pservers = options["pservers"]
    middle = {name: float(np.median([each[name] for each in rounds])) for name in rounds[0]}
    size = (
        f"{grouped(options['rows'])} rows, dim {options['dim']} with {options['rule']} on {num_pservers} pserver "
        f"processes; {grouped(run['num_bytes'] / 1e6)} MB, {run['num_bytes'] / options['rows']:.1f} bytes a row on "
        "disk. "
    )
    rows = []
    for what, name, base in (
        (f"{num_pservers} processes write and fsync as many bytes", "raw write and fsync", "raw write and fsync"),
        ("save, until it is committed", "save", "raw write and fsync"),
        ("save while one worker pushes without pause", "save during pushes", "raw write and fsync"),
        ("the moment of the save, during which pushes wait", "save, until pushes may go on", ""),
        (f"{num_pservers} processes read as many bytes, from disk", "raw read", "raw read"),
        (f"{num_pservers} pservers start, empty", "start, empty", ""),
        (f"{num_pservers} pservers start and load", "start and load", ""),
        ("of that, the load", "the load of that, by difference", "raw read"),
        (f"{num_pservers + 1} pservers start and load", "start and load, one more", ""),
        (f"{num_pservers} pservers start and load the full snapshot and two deltas", "start and load, two deltas", ""),
        ("one killed pserver is started again, until it answers a pull", "restart until it answers", ""),
    ):
        ratio = f"{middle[name] / middle[base]:.2f}" if base else ""
        rows.append((what, spread([each[name] for each in rounds], 2), ratio))
    text = f"{about(run, size)}{table(('', 's (quartiles)', 'over raw'), rows)}\n{saves(rounds, run['num_bytes'])}\n"
    pushes = [
        (
            when,
            f"{middle[name + ', median ms']:.1f}",
            f"{middle[name + ', p99 ms']:.1f}",
            ", ".join(f"{each[name + ', p99 ms']:.1f}" for each in rounds),
        )
        for when, name in (("idle", "push"), ("during a save", "push during a save"))
    ]
    heading = ("a push of 13 000 ids until it is applied", "median ms", "p99 ms", "p99 of each round")
    text += table(heading, pushes)
    ratio_of_p99 = middle["push during a save, p99 ms"] / middle["push, p99 ms"]
    text += f"\nSo p99 during a save is {ratio_of_p99:.1f} times that of an idle pserver.\n"
    peer = run["peer"]
    if peer:
        heading = (
            f"PaddlePaddle 2.6.2, {peer['servers']} servers, {peer['shards']} shards, one run",
            "it",
            "here",
            "ratio",
        )
        here = run["num_bytes"] / 1e6
        text += "\n" + table(
            heading,
            [
                ("save, s", *compared(peer["save_s"], middle["save"])),
                ("start and load, s", *compared(peer["start_with_load_s"], middle["start and load"])),
                ("`load_model` while running, s", f"{peer['load_model_s']:.1f}", "", ""),
                ("MB on disk", *compared(peer["save_bytes"] / 1e6, here)),
                ("rows inserted, M rows/s", f"{peer['rows'] / peer['insert_s'] / 1e6:.2f}", "", ""),
            ],
        )
    return Block(text, {})


def saves(rounds: Sequence[dict[str, float]], num_bytes: int) -> str:
    """A table of the full save and of deltas."""
    kinds = [("all rows", "save", [float(num_bytes)])]
    for name in rounds[0]:
        if name.startswith("save a delta of "):
            changed = name.removeprefix("save a ")
            kinds.append(
                (
                    changed.replace(" of ", ", ") + " of the rows changed",
                    name,
                    [each[f"bytes of a {changed}"] for each in rounds],
                )
            )
    rows = [
        (
            what,
            spread([each[name] for each in rounds], 2),
            f"{np.median(sizes) / 1e6:.1f}",
            f"{np.median(sizes) / num_bytes:.3f}",
        )
        for what, name, sizes in kinds
    ]
    return table(("a save of", "s (quartiles)", "MB", "of the full one's bytes"), rows)


def dense(run: Run) -> Block:
    """Dense parameters, by workers, size and way."""
    rounds, options = run["rounds"], run["options"]
    ways = list(dict.fromkeys(name.split(" kB, ")[1] for name in rounds[0]))
    rows = []
    for num_workers in options["workers"]:
        for kilobytes in options["kilobytes"]:
            names = (f"{num_workers}, {kilobytes:g} kB, {way}" for way in ways)
            times = (spread(joined(each[name] for each in rounds) * MS, 2) for name in names)
            rows.append((f"{num_workers}, {kilobytes:g} kB", *times))
    return Block(about(run) + table(("workers, size", *ways), rows), {})


def convergence(run: Run) -> Block:
    """Test AUC of each mode."""
    rounds = run["rounds"]
    first = next(iter(rounds[0]))
    rows = []
    for name in rounds[0]:
        aucs = np.array([each[name]["test_auc"] for each in rounds])
        differences = aucs - [each[first]["test_auc"] for each in rounds]
        of_seeds = "" if name == first else " ".join(f"{each:+.5f}" for each in differences)
        rate = np.median([each[name]["examples_per_s"] for each in rounds])
        mean = "" if name == first else f"{differences.mean():+.5f}"
        rows.append((name, f"{aucs.mean():.4f}", mean, of_seeds, grouped(rate)))
    return Block(about(run) + table(("mode", "test AUC", "difference", "of each seed", "examples/s"), rows), {})


def took(results: Path) -> Block | None:
    """How long the newest run of each way took, where it is recorded: a sentence."""
    minutes: dict[str, float] = {}
    for name in sorted(path.stem for path in results.glob("*.jsonl")):
        seconds = {way_of(run): run["seconds"] for run in recorded(results, name) if "seconds" in run}
        if seconds:
            minutes[name] = sum(seconds.values()) / MINUTE_S
    if not minutes:
        return None
    longest = sorted(minutes, key=lambda name: minutes[name], reverse=True)
    each = ", ".join(f"{name} {minutes[name]:.1f}" for name in longest)
    told = f"The newest runs took {sum(minutes.values()):.0f} minutes together: {each}."
    return Block(textwrap.fill(told, LINE_LENGTH) + "\n", {})


def way_of(run: Run) -> str:
    """All options of a run, as a key."""
    return json.dumps(run["options"], sort_keys=True)


BLOCKS: dict[str, Callable[[Path], Block | None]] = {
    "figures": lambda results: Block(table(figures.HEADINGS, figures.rows(results, figures.FIGURES)), {}),
    "limits": limits,
    "took": took,
    "start": of_run("start", start),
    "kernels": of_run("kernels", kernels),
    "client": of_run("client", client),
    "local": of_run("local", local),
    "lookup": lookup,
    "step": step,
    "parts": parts,
    "cluster": of_run("cluster", cluster),
    "growth": of_run("growth", growth),
    "snapshot": of_run("snapshot", snapshot),
    "dense": of_run("dense", dense),
    "convergence-flights": of_run("convergence", convergence, lambda options: options["data"][0] == "flights"),
    "scale": of_run("scale", scale),
    "convergence-synthetic": of_run("convergence", convergence, lambda options: options["data"][0] == "synthetic"),
}


def newest_by(results: Path, name: str, options: Sequence[str]) -> list[Run]:
    """Of each combination of these options the newest run, in the order of modes."""
    by_options = {tuple(figures.set_to(run, option) for option in options): run for run in recorded(results, name)}
    return sorted(by_options.values(), key=lambda run: MODES.index(run["options"]["mode"]))


def stepped(runs: Sequence[Run], file: str, title: str, before: str, *, in_ms: bool) -> Block:
    """A table and a plot of steps: of each run those on pservers, of the first one all.

    Args:
        runs: At least one.
        file: Of the plot.
        title: Of the plot.
        before: What begins the first paragraph.
        in_ms: The plot has ms of a step, and not its ratio to the floor.
    """
    text, rows, bars_ = "", [], []
    for number, run in enumerate(runs):
        options = run["options"]
        where = where_of(options)
        text += about(run, f"{'' if number else before}{where}: ")
        for name in run["rounds"][0]:
            times = joined(each[name]["seconds"] for each in run["rounds"])
            over_floor = np.array(figures.ratios(run, name, FLOOR).of_rounds)
            rows.append((f"{where}: {name}", *step_cells(run, name, times, over_floor)))
            drawn = times * MS if in_ms else over_floor
            if number == 0 or name in {OURS, AHEAD}:
                bars_.append(plot.Bar(f"{where}: {name}", *np.percentile(drawn, [25, 50, 75]).tolist()))
    headings = "mode, channel: program|median ms (quartiles)|over the floor, of rounds|examples/s|CPU ms, both"
    svg = plot.bars(title, "ms" if in_ms else "times the floor", bars_, mark=None if in_ms else 1.0)
    return Block(text + table(headings.split("|"), rows) + picture(file, title), {file: svg})


def where_of(options: dict[str, Any]) -> str:
    """How the steps of a run were made."""
    lag = options.get("max_step_lag")
    bound = "" if lag is None else f", max_step_lag {lag}"
    how = [text for option, text in (("serial", "serial"), ("mkl_avx2", "MKL with AVX2")) if options.get(option)]
    return ", ".join([f"{options['mode']}{bound}", options["channel"], *how])


def step_cells(run: Run, name: str, times: Any, over_floor: Any) -> tuple[str, ...]:
    """What the table says of a contender, beside its name; CPU is that of the worker and of the pservers."""
    blocks = [each[name] for each in run["rounds"]]
    parts = [part for part in ("worker_cpu_s", "pservers_cpu_s") if part in blocks[0]]
    cpu = [f"{np.median([each[part] / len(each['seconds']) for each in blocks]) * MS:.1f}" for part in parts]
    rate = run["batch"] / np.median(times)
    return spread(times * MS, 2), spread(over_floor, 2), grouped(rate), " + ".join(cpu)


def about(run: Run, before: str = "") -> str:
    """What stands before, and where and when a run was measured: a paragraph."""
    machine = run["machine"]
    packages = machine["packages"]
    versions = ", ".join(f"{name} {packages[name]}" for name in ("paddlepaddle", "numpy", "numba") if name in packages)
    changed = " with changes" if run["is_dirty"] else ""
    rounds = "one round" if len(run["rounds"]) == 1 else f"{len(run['rounds'])} rounds"
    commit = f"Commit {run['commit']}{changed}" if run["commit"] else "No commit known"
    told = (
        f"{before}{commit}, {run['date'][:10]}, {rounds}; {machine['cpu']}, "
        f"{machine['cores']} cores, {machine['memory_bytes'] / GB:.0f} GB, load {machine['load']:.1f} before, "
        f"Linux {machine['kernel'].split('-')[0]}, Python {machine['python']}, {versions}."
    )
    return textwrap.fill(told, LINE_LENGTH, break_on_hyphens=False) + "\n\n"


def table(heading: Sequence[Any], rows: Iterable[Sequence[Any]]) -> str:
    """Markdown."""
    lines = [heading, ["---"] * len(heading), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def picture(name: str, what: str) -> str:
    """Markdown of a plot."""
    return f"\n![{what}]({PLOTS}/{name})\n"


def spread(values: Any, digits: int) -> str:
    """Median and quartiles."""
    low, middle, high = np.percentile(values, [25, 50, 75])
    return f"{middle:.{digits}f} ({low:.{digits}f} - {high:.{digits}f})"


def compared(theirs: float, ours: float) -> tuple[str, str, str]:
    """Two figures and their ratio."""
    return f"{theirs:.1f}", f"{ours:.1f}", f"{theirs / ours:.1f}"


def joined(parts: Iterable[Sequence[float]]) -> Any:
    """One array of all."""
    return np.concatenate([np.asarray(part) for part in parts])


def nearest(num_rows: int, asked: Sequence[int]) -> int:
    """The smallest number of rows that was asked for and holds these; the largest if none does."""
    return min((each for each in asked if each >= num_rows), default=max(asked))


def grouped(value: float) -> str:
    """Rounded, with a space between thousands."""
    return f"{value:,.0f}".replace(",", " ")


def short_rows(num_rows: int) -> str:
    """In millions, or thousands."""
    return f"{num_rows / 1e6:.3g} M" if num_rows >= 1e6 else f"{num_rows / 1e3:.3g} k"
