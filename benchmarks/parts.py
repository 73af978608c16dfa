"""Where does the time of a step with pservers go?

`python -m benchmarks.parts` from the root of a checkout. The click model of `benchmarks.step` or the lookup model of
`benchmarks.lookup`, plainly and looking ahead, with timers around the two ops and what they call, and the same step
with its rows fed from memory, all by turns. What is neither op is Paddle's: its Python before the first op, the ops of
the program, and what comes after the last one. The loader is the step without `exe.run`: to get the next batch, and
what looking ahead does there. The parts of a step add up to it, their medians nearly.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import wraps
from typing import Any, NamedTuple

import numpy as np
import paddle
from rich.console import Console
from rich.table import Table

from benchmarks import lookup, step
from benchmarks.contenders import AHEAD, FLOOR, OURS
from benchmarks.options import AT_LEAST_1
from benchmarks.record import Record
from fleet_sparse.plugin.session import Session
from fleet_sparse.plugin.static import op_callbacks

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
    """When a call began and ended."""

    name: str
    begun_at: float
    ended_at: float

    @property
    def seconds(self) -> float:
        """Between."""
        return self.ended_at - self.begun_at


class Timers:
    """What took how long since the last `take`, in the order of the ends."""

    def __init__(self) -> None:
        self._timers: list[Timer] = []

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, timed."""

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun_at = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._timers.append(Timer(name, begun_at, time.perf_counter()))

        return timed

    def around_what(self, name: str, make: Callable[..., Any]) -> Callable[..., Any]:
        """A function that makes the same functions, timed."""

        @wraps(make)
        def made(*args: Any, **kwargs: Any) -> Callable[..., Any]:
            return self.around(name, make(*args, **kwargs))

        return made

    def take(self) -> list[Timer]:
        """All of them; then there are none."""
        timers, self._timers = self._timers, []
        return timers


def replace(stack: ExitStack, owner: Any, attribute: str, value: Any) -> None:
    """Sets an attribute until the stack ends."""
    stack.callback(setattr, owner, attribute, getattr(owner, attribute))
    setattr(owner, attribute, value)


def watch(stack: ExitStack) -> Timers:
    """Timers around the ops of programs that are built from now on, and what they call, until the stack ends."""
    timers = Timers()
    for name in (PREFETCH, UPDATE):
        replace(stack, op_callbacks, name, timers.around_what(name, getattr(op_callbacks, name)))
    for name, attribute in ((DISTINCT, "unique"), (PULL, "prefetch"), (PUSH, "update")):
        replace(stack, Session, attribute, timers.around(name, getattr(Session, attribute)))
    replace(stack, paddle.static.Executor, "run", timers.around(RUN, paddle.static.Executor.run))
    return timers


def parts_of(timers: Sequence[Timer], seconds: Sequence[float]) -> list[dict[str, float]]:
    """Seconds of the parts of each step that has both ops.

    Args:
        timers: Of a block.
        seconds: Of its steps; each has one run.
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
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("click", "lookup"), default="click")
    parser.add_argument("--mode", choices=("async", "sync"), default="sync", help="of training")
    parser.add_argument("--steps", type=AT_LEAST_1, default=8, help="of a block")
    step.add_options(parser)
    parser.set_defaults(local_rows=0)
    options = parser.parse_args()
    record = Record("parts", options)
    of_turns: dict[str, list[list[dict[str, float]]]] = defaultdict(list)
    with ExitStack() as stack:
        timers = watch(stack)
        block = step.block

        def timed_block(contender: step.Contender, feeds: Iterable[step.Feed], pids: Sequence[int]) -> step.Block:
            timers.take()
            took = block(contender, feeds, pids)
            of_turns[contender.name].append(parts_of(timers.take(), took.seconds))
            return took

        replace(stack, step, "block", timed_block)
        name, feeds, loss_of = (step.model if options.model == "click" else lookup.model)(options.batches)
        measured = step.run(name, feeds, loss_of, options)
    # Of each program the last turns are those that were measured.
    parts = {name: of_turns[name][-len(measured) :] for name in (OURS, AHEAD)}
    show(options, parts, measured)
    rounds = [
        {name: {"seconds": each[name].seconds, "parts": parts[name][number] if name in parts else []} for name in each}
        for number, each in enumerate(measured)
    ]
    record.append(rounds)


def medians_ms(turns: Sequence[Sequence[dict[str, float]]]) -> dict[str, float]:
    """Of each part, over all steps."""
    steps = [each for turn in turns for each in turn]
    return {part: 1e3 * float(np.median([each[part] for each in steps])) for part in PARTS}


def show(
    options: argparse.Namespace, parts: dict[str, list[list[dict[str, float]]]], measured: Sequence[step.Round]
) -> None:
    """One table: medians of each part, and of the whole."""
    table = Table(title=f"{options.model} step, {options.mode}, {options.channel}; median ms")
    for heading in ("part", *parts, FLOOR):
        table.add_column(heading, justify="right" if heading != "part" else "left")
    medians = {name: medians_ms(turns) for name, turns in parts.items()}
    for part in PARTS:
        table.add_row(part, *(f"{medians[name][part]:.2f}" for name in parts), "")
    whole = (1e3 * np.median(np.concatenate([each[name].seconds for each in measured])) for name in (*parts, FLOOR))
    table.add_row("the step", *(f"{each:.2f}" for each in whole))
    Console().print(table)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
