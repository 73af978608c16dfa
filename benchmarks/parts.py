"""Where does the time of a step with pservers go?

`python -m benchmarks.parts` from the root of a checkout. The click model of `benchmarks.step` or the lookup model of
`benchmarks.lookup`, plainly and looking ahead, with timers around the two ops and what they call, and the same step
with its rows fed from memory, interleaved. What is neither op is Paddle's: its Python before the first op, the ops of
the program, and what comes after the last one. The loader is the step without `exe.run`: to get the next batch, and
what looking ahead does there. The parts of a step add up to it, their medians nearly. Python and C calls of the two ops
are counted in the steps before the timed ones, and so are system calls, by `strace` where it is installed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any, NamedTuple

import numpy as np
import paddle
from rich.console import Console
from rich.table import Table

from benchmarks import lookup, step
from benchmarks.options import AT_LEAST_1
from benchmarks.programs import AHEAD, FLOOR, OURS
from benchmarks.record import Record
from benchmarks.system_calls import system_calls
from fleet_sparse.plugin.session import Session
from fleet_sparse.plugin.static import op_callbacks
from fleet_sparse.worker.modes.sync_async import PserverTraining
from fleet_sparse.worker.rows.deduplicator import Deduplicator

RUN, PREFETCH, UPDATE = "exe.run", "prefetch", "update"
DISTINCT, PULL, PUSH = "distinct ids", "rows pulled", "gradients pushed, dense values exchanged"
PARTS = (
    LOADER := "the loader",
    BEFORE := "Paddle, before the first op",
    DISTINCT,
    PULL,
    REST_OF_PREFETCH := "the rest of prefetch",
    COMPUTED := "forward and backward",
    PUSH,
    REST_OF_UPDATE := "the rest of update",
    AFTER := "Paddle, after the last op",
)


class Timer(NamedTuple):
    """Begin and end of a call."""

    name: str
    begun_at: float
    ended_at: float

    @property
    def seconds(self) -> float:
        """Seconds between begin and end."""
        return self.ended_at - self.begun_at


class Timers:
    """Timers of calls since the last `take`, in the order of their ends."""

    def __init__(self) -> None:
        self._timers: list[Timer] = []

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function with a timer around it."""

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun_at = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._timers.append(Timer(name, begun_at, time.perf_counter()))

        return timed

    def around_what(self, name: str, make: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a factory whose functions have timers around them."""

        @wraps(make)
        def made(*args: Any, **kwargs: Any) -> Callable[..., Any]:
            return self.around(name, make(*args, **kwargs))

        return made

    def take(self) -> list[Timer]:
        """Returns all timers and forgets them."""
        timers, self._timers = self._timers, []
        return timers


class Calls:
    """Counts Python and C calls of op callbacks, which run on threads of Paddle.

    Attributes:
        counts: For each op the number of Python calls and of C calls of each run that was counted.
        counts_now: True to count the runs that follow, which makes them slow.
    """

    def __init__(self) -> None:
        self.counts: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self.counts_now = False

    def inside(self, name: str, make: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a factory whose functions have their calls counted."""

        @wraps(make)
        def made(*args: Any, **kwargs: Any) -> Callable[..., Any]:
            function = make(*args, **kwargs)

            def counted(*args: Any) -> Any:
                if not self.counts_now:
                    return function(*args)
                events: Counter[str] = Counter()

                def count(frame: Any, event: str, _: object) -> None:
                    if frame.f_code.co_filename != __file__:  # not the timers
                        events[event] += 1

                sys.setprofile(count)
                try:
                    return function(*args)
                finally:
                    sys.setprofile(None)
                    self.counts[name].append((events["call"], events["c_call"]))

            return counted

        return made

    def fewest(self) -> dict[str, tuple[int, int]]:
        """Returns for each op the counts of the run with the fewest calls: others have polled more often."""
        return {name: min(counts, key=sum) for name, counts in self.counts.items()}


def counted_block(
    take: Callable[[], step.Block], pids: Sequence[int]
) -> tuple[step.Block, dict[str, dict[str, float]]]:
    """Runs a block; returns it and the system calls of a step by name, of the worker and of the pservers."""
    # The worker's come last, because a process that it starts is counted with it.
    with system_calls(pids) as of_pservers, system_calls([os.getpid()]) as of_worker:
        took = take()
    found = {"worker": of_worker, "pservers": of_pservers}
    return took, {
        part: {name: count / len(took.seconds) for name, count in counts.items()} for part, counts in found.items()
    }


def replace(stack: ExitStack, owner: Any, attribute: str, value: Any) -> None:
    """Sets an attribute until the stack ends."""
    stack.callback(setattr, owner, attribute, getattr(owner, attribute))
    setattr(owner, attribute, value)


def watch(stack: ExitStack) -> Timers:
    """Puts timers around the ops of programs that are built from now on, and their calls, until the stack ends."""
    timers = Timers()
    for name in (PREFETCH, UPDATE):
        replace(stack, op_callbacks, name, timers.around_what(name, getattr(op_callbacks, name)))
    for name, owner, attribute in (
        (DISTINCT, Deduplicator, "place"),
        (PULL, PserverTraining, "prefetch"),
        (PUSH, Session, "update"),
    ):
        replace(stack, owner, attribute, timers.around(name, getattr(owner, attribute)))
    replace(stack, paddle.static.Executor, "run", timers.around(RUN, paddle.static.Executor.run))
    return timers


def parts_of(timers: Sequence[Timer], seconds: Sequence[float]) -> list[dict[str, float]]:
    """Returns the seconds of the parts of each step that has both ops.

    Args:
        timers: Timers of a block.
        seconds: Seconds of its steps; each has one run.
    """
    steps = []
    runs = [timer for timer in timers if timer.name == RUN]
    for run, of_step in zip(runs, seconds, strict=True):
        inside = [each for each in timers if run.begun_at <= each.begun_at and each.ended_at <= run.ended_at]
        by_name = {each.name: each for each in inside}
        if PREFETCH not in by_name or UPDATE not in by_name:
            continue
        prefetch, update = by_name[PREFETCH], by_name[UPDATE]
        took: dict[str, float] = defaultdict(float)
        for each in inside:
            if each.begun_at >= prefetch.begun_at:
                took[each.name] += each.seconds
        took[LOADER] = of_step - run.seconds
        took[BEFORE] = prefetch.begun_at - run.begun_at
        took[REST_OF_PREFETCH] = prefetch.seconds - took[DISTINCT] - took[PULL]
        took[COMPUTED] = update.begun_at - prefetch.ended_at
        took[REST_OF_UPDATE] = update.seconds - took[PUSH]
        took[AFTER] = run.ended_at - update.ended_at
        steps.append({part: took[part] for part in PARTS})
    return steps


def main() -> None:
    """Measures the parts and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("click", "lookup"), default="click")
    parser.add_argument("--mode", choices=("async", "sync"), default="sync", help="mode of training")
    parser.add_argument("--steps", type=AT_LEAST_1, default=8, help="steps of a block")
    step.add_options(parser)
    parser.set_defaults(local_rows=0)
    options = parser.parse_args()
    record = Record("parts", options)
    of_blocks: dict[str, list[list[dict[str, float]]]] = defaultdict(list)
    calls = Calls()
    of_system: dict[str, dict[str, dict[str, float]]] = {}
    with ExitStack() as stack:
        for name in (PREFETCH, UPDATE):
            replace(stack, op_callbacks, name, calls.inside(name, getattr(op_callbacks, name)))
        timers = watch(stack)
        block = step.block

        def timed_block(program: step.Program, feeds: Iterable[step.Feed], pids: Sequence[int]) -> step.Block:
            timers.take()
            calls.counts_now = program.name == OURS and not of_blocks[OURS]  # the first block is not measured
            take = partial(block, program, feeds, pids)
            if not calls.counts_now and program.name not in of_system:  # nor is the first round
                took, of_system[program.name] = counted_block(take, pids)
            else:
                took = take()
            calls.counts_now = False
            of_blocks[program.name].append(parts_of(timers.take(), took.seconds))
            return took

        replace(stack, step, "block", timed_block)
        name, feeds, loss_of = (step.model if options.model == "click" else lookup.model)(options.batches)
        measured = step.run(name, feeds, loss_of, options)
    # The last blocks of each program are the measured ones.
    parts = {name: of_blocks[name][-len(measured) :] for name in (OURS, AHEAD)}
    show(options, parts, measured)
    for name, (num_python, num_c) in calls.fewest().items():
        Console().print(f"{name}: {num_python} Python calls, {num_c} C calls")
    for name, found in of_system.items():
        told = ", ".join(f"{part} {sum(counts.values()):.0f}" for part, counts in found.items() if counts)
        Console().print(f"{name}: system calls of a step: {told or 'not counted, because strace is missing'}")
    rounds = [
        {name: {"seconds": each[name].seconds, "parts": parts[name][number] if name in parts else []} for name in each}
        for number, each in enumerate(measured)
    ]
    record.append(rounds, calls=calls.fewest(), system_calls=of_system)


def medians_ms(blocks: Sequence[Sequence[dict[str, float]]]) -> dict[str, float]:
    """Returns the median ms of each part over all steps."""
    steps = [each for block in blocks for each in block]
    return {part: 1e3 * float(np.median([each[part] for each in steps])) for part in PARTS}


def show(
    options: argparse.Namespace, parts: dict[str, list[list[dict[str, float]]]], measured: Sequence[step.Round]
) -> None:
    """Prints a table of the medians of each part and of the whole step."""
    table = Table(title=f"{options.model} step, {options.mode}, {options.channel}; median ms")
    for heading in ("part", *parts, FLOOR):
        table.add_column(heading, justify="right" if heading != "part" else "left")
    medians = {name: medians_ms(blocks) for name, blocks in parts.items()}
    for part in PARTS:
        table.add_row(part, *(f"{medians[name][part]:.2f}" for name in parts), "")
    whole = (1e3 * np.median(np.concatenate([each[name].seconds for each in measured])) for name in (*parts, FLOOR))
    table.add_row("the step", *(f"{each:.2f}" for each in whole))
    Console().print(table)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
