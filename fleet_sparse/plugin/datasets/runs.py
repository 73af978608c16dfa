"""Runs of a program over a data set: `exe.train_from_dataset` and `exe.infer_from_dataset`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import paddle
from paddle.base.libpaddle import pir

from fleet_sparse.errors import PlanError
from fleet_sparse.warm_up import warm_up

from ..active_session import active
from ..look_ahead import look_ahead
from ..static import programs
from ..static.fleet_opt import options_of
from ..static.value_name import value_named
from .dump import dump_of
from .feeds import Feed, FeedMaker
from .lines import in_batches
from .memory_calls import IN_MEMORY, QUEUES, memory_of, worker_index
from .readers import in_turns
from .source import Source, read_source
from .text import Processes

_GRACE_S = 10.0
"""Seconds that a run waits for a batch after a command should have been reported as silent."""
_UNSUPPORTED = ("dump_param", "use_ps_gpu")
"""Keys of `program._fleet_opt` that are refused."""

_for_test: WeakKeyDictionary[pir.Program, pir.Program] = WeakKeyDictionary()


class Options(NamedTuple):
    """Arguments of `exe.train_from_dataset`, with Paddle's names and defaults."""

    program: Any = None
    dataset: Any = None
    scope: Any = None
    thread: int = 0
    debug: bool = False
    fetch_list: Sequence[Any] | None = None
    fetch_info: Sequence[str] | None = None
    print_period: int = 100
    fetch_handler: Any = None


def run_from_dataset(executor: Any, caller: str, options: Options, *, trains: bool) -> None:
    """Runs a program once for each batch of a data set.

    Args:
        executor: Runs the program.
        caller: Name of the call, for messages.
        options: Arguments of the call.
        trains: False to run a copy without the training part of a program that trains on pservers.

    Raises:
        PlanError: An argument or a setting of the data set is not supported.
        DatasetError: A file or its `pipe_command` is wrong. The batches before it have been run.
    """
    program = trained = paddle.static.default_main_program() if options.program is None else options.program
    _check(caller, program, options)
    if not trains and programs.is_trained(program):
        program = _clone_for_test(program)
    warm_up()  # a program without tables needs no fleet.init_worker()
    source = _source_of(options)
    inputs = _inputs_of(program)
    report = _Report(caller, options)
    dump = dump_of(caller, options_of(trained), worker_index(), lambda name: value_named(program, name) is not None)
    num_reported = len(report.fetch_list)
    fetch_list = report.fetch_list if dump is None else [*report.fetch_list, *dump.fields]
    with (
        contextlib.nullcontext() if dump is None else contextlib.closing(dump),
        contextlib.closing(_feeds_of(caller, options.dataset, source, inputs)) as feeds,
    ):
        for feed in report.reads(_looked_ahead(feeds, program)):
            values = executor.run(program, feed=feed, fetch_list=fetch_list, scope=options.scope, return_numpy=False)
            report.note_run(feed.num_lines, values[:num_reported])
            if dump is not None:
                dump.write(feed.num_lines, values[num_reported:])
    report.end()


def _clone_for_test(program: pir.Program) -> pir.Program:
    if program not in _for_test:
        _for_test[program] = programs.clone_for_test(program)
    return _for_test[program]


def _check(caller: str, program: Any, options: Options) -> None:
    if not isinstance(program, pir.Program):
        raise PlanError(f"{caller}: program is a {type(program).__name__}, should be a paddle.static.Program")
    if not isinstance(options.dataset, (*IN_MEMORY, *QUEUES)):
        kind = type(options.dataset)
        raise PlanError(
            f"{caller}: dataset is a {kind.__module__}.{kind.__qualname__}, should be a "
            "paddle.distributed.InMemoryDataset or QueueDataset"
        )
    settings = options_of(program)
    for name in _UNSUPPORTED:
        if settings.get(name):
            raise PlanError(
                f"{caller}: {name} is {settings[name]!r} and is not supported. Leave it out; dump_fields, "
                "fetch_list and fetch_handler give values of the program"
            )


def _source_of(options: Options) -> Source:
    source = read_source(options.dataset, active().settings.pipe_s)
    return source._replace(num_threads=options.thread) if options.thread > 0 else source


def _inputs_of(program: pir.Program) -> set[str]:
    return {str(op.str_attr("name")) for op in program.global_block().ops if str(op.name()) == "pd_op.data"}


def _feeds_of(caller: str, dataset: Any, source: Source, inputs: set[str]) -> Generator[Feed, None, None]:
    """The feeds of a data set, which other threads make."""
    processes = Processes()
    if isinstance(dataset, IN_MEMORY):
        memory = memory_of(dataset)
        makers = [partial(_from_memory, source, inputs, memory.held(caller), memory.order.copy(), processes)]
    else:
        makers = [partial(_from_files, source, inputs, paths, processes) for paths in source.shares()]
    return in_turns(makers, source.pipe.timeout_s + _GRACE_S, processes.end)


def _from_memory(source: Source, inputs: set[str], lines: Any, order: Any, processes: Processes) -> Iterator[Feed]:
    maker = FeedMaker(source.slots, inputs)
    for begin in range(0, len(order), source.batch_size):
        if processes.is_ended:
            return
        yield maker.make(lines, order[begin : begin + source.batch_size])


def _from_files(source: Source, inputs: set[str], paths: Sequence[str], processes: Processes) -> Iterator[Feed]:
    maker = FeedMaker(source.slots, inputs)
    for batch in in_batches(source.lines_of(paths, processes), source.batch_size):
        yield maker.make(batch, np.arange(batch.num_lines))


def _looked_ahead(feeds: Iterable[Feed], program: pir.Program) -> Iterable[Any]:
    """The feeds; if pservers train tables on ids of the data set, the rows of the next one are pulled early."""
    plan = programs.plan_of(program)
    if plan is None or not active().connection("exe.train_from_dataset").role.pserver_endpoints:
        return feeds  # a pserver inside this process answers at once
    if not any(all(plan.sites[site].fed_by for site in table.sites) for table in plan.tables):
        return feeds
    return look_ahead(feeds, program)


class _Report:
    """Reports of a run until it ends: fetched values, the values of a handler, and speed."""

    def __init__(self, caller: str, options: Options) -> None:
        self._caller = caller
        self._debug = options.debug
        self._print_period = options.print_period
        printed = list(options.fetch_list or [])
        self._labels = list(options.fetch_info or [f"value {number}" for number in range(len(printed))])
        if len(self._labels) != len(printed):
            raise PlanError(
                f"{caller}: fetch_info has {len(self._labels)} texts, should have {len(printed)}, as fetch_list"
            )
        if printed and options.print_period < 1:
            raise PlanError(f"{caller}: print_period is {options.print_period}, should be 1 or more")
        self._handler = options.fetch_handler
        handled = {} if self._handler is None else dict(self._handler.var_dict)
        self._names = list(handled)
        self.fetch_list = [*printed, *handled.values()]
        self._begun_at = self._handled_at = time.monotonic()
        self._waited_s = 0.0
        self._num_batches = self._num_examples = 0

    def reads(self, feeds: Iterable[Any]) -> Iterator[Any]:
        """Yields the feeds, and measures how long they are waited for."""
        begun_at = time.monotonic()
        for feed in feeds:
            self._waited_s += time.monotonic() - begun_at
            yield feed
            begun_at = time.monotonic()

    def note_run(self, num_examples: int, values: Sequence[Any]) -> None:
        """Prints or hands over what was fetched, if it is time to."""
        self._num_batches += 1
        self._num_examples += num_examples
        printed = values[: len(self._labels)]
        if printed and self._num_batches % self._print_period == 0:
            texts = (f"{label}: {_text(value)}" for label, value in zip(self._labels, printed, strict=True))
            now = time.strftime("%Y-%m-%d %H:%M:%S")
            print(f"time: [{now}], batch: [{self._num_batches}], {', '.join(texts)}", flush=True)
        if self._handler is not None and time.monotonic() - self._handled_at >= self._handler.period_secs:
            self._handled_at = time.monotonic()
            arrays = map(np.array, values[len(self._labels) :])
            self._handler.handler(dict(zip(self._names, arrays, strict=True)))

    def end(self) -> None:
        """Prints the speed, if that is wanted."""
        if self._debug:
            seconds = time.monotonic() - self._begun_at
            print(
                f"{self._caller}: {self._num_examples} examples in {self._num_batches} batches, {seconds:.3f} s, "
                f"{self._num_examples / seconds:.0f} examples/s; waited {self._waited_s:.3f} s for data",
                flush=True,
            )


def _text(value: Any) -> str:
    return "[" + ",".join(f"{each:.6g}" for each in np.array(value).reshape(-1).tolist()) + "]"
