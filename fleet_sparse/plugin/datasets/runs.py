"""Runs of a program over a data set: `exe.train_from_dataset` and `exe.infer_from_dataset`."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import paddle
from paddle.base.libpaddle import pir

from fleet_sparse.core.mode import ASYNC
from fleet_sparse.errors import PlanError
from fleet_sparse.transpiler.plan import RewritePlan
from fleet_sparse.warm_up import warm_up

from ..active_session import active
from ..look_ahead import announced, prepared
from ..resumable import Resumable
from ..static import programs
from ..static.bound_executor import bound_copies, new_ir_in_threads, serial_ops
from ..static.fleet_opt import options_of
from ..static.value_name import value_named
from .dump import FieldsDump, dump_of
from .feeds import Feed, FeedMaker
from .lines import in_batches
from .memory_calls import IN_MEMORY, QUEUES, memory_of, worker_index
from .readers import in_turns
from .source import Source, read_source
from .text import Processes
from .trainers import share_out

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

    In async training `thread_num` batches are trained at once, each on a thread of its own; elsewhere one is.

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
    resumable, options = _without_position(options)
    _check(caller, program, options)
    if not trains and programs.is_trained(program):
        program = _clone_for_test(program)
    warm_up()  # a program without tables needs no fleet.init_worker()
    source = _source_of(options)
    report = _Report(caller, options)
    dump = dump_of(caller, options_of(trained), worker_index(), lambda name: value_named(program, name) is not None)
    is_async = trains and _is_trained_async(program)
    num_at_once = min(source.num_threads, len(os.sched_getaffinity(0))) if is_async else 1
    processes = Processes()

    def feeds_after(num_skipped: int) -> Iterator[Feed]:
        feeds = _feeds_of(caller, options.dataset, source, _inputs_of(program), processes, num_skipped)
        stack.callback(_close, feeds)
        plan = _plan_to_look_ahead(program) if num_at_once == 1 else None
        if plan is None:
            return feeds
        pairs = in_turns([partial(prepared, feeds, plan)], source.pipe.timeout_s + _GRACE_S, processes.end)
        stack.enter_context(contextlib.closing(pairs))
        return stack.enter_context(contextlib.closing(announced(pairs, plan)))

    with contextlib.ExitStack() as stack:
        if dump is not None:
            stack.callback(dump.close)
        if is_async:
            stack.enter_context(serial_ops())
            stack.enter_context(new_ir_in_threads())
        position = resumable if trains else None
        feeds = feeds_after(0) if position is None else position.read_from(feeds_after)
        scope = paddle.static.global_scope() if options.scope is None else options.scope
        works = [
            partial(_run_batch, report, dump, each, program, scope)
            for each in bound_copies(executor, scope, num_at_once)
        ]
        done = (lambda: None) if position is None else position.note_done
        share_out(report.reads(feeds), _compiled_alone(works), processes.end, done)
    if trains:
        active().end_pass()
    report.end()


def _run_batch(
    report: _Report, dump: FieldsDump | None, executor: Any, program: pir.Program, scope: Any, feed: Feed
) -> None:
    num_lines, num_reported = feed.num_lines, len(report.fetch_list)
    fetch_list = report.fetch_list if dump is None else [*report.fetch_list, *dump.fields]
    values = executor.run(program, feed=feed, fetch_list=fetch_list, scope=scope, return_numpy=False)
    report.note_run(num_lines, values[:num_reported])
    if dump is not None:
        dump.write(num_lines, values[num_reported:])


def _compiled_alone(works: Sequence[Callable[[Feed], None]]) -> list[Callable[[Feed], None]]:
    """Each as before, but no two of the first runs, in which Paddle compiles, are at once."""
    compiling = threading.Lock()

    def run(work: Callable[[Feed], None], begun: list[bool], feed: Feed) -> None:
        if begun:
            work(feed)
            return
        with compiling:
            begun.append(True)
            work(feed)

    return [partial(run, work, []) for work in works]


def _without_position(options: Options) -> tuple[Resumable | None, Options]:
    """The options with the data set itself, and the `Resumable` that knows its position."""
    if isinstance(options.dataset, Resumable):
        return options.dataset, options._replace(dataset=options.dataset.loader)
    return None, options


def _is_trained_async(program: pir.Program) -> bool:
    """Returns whether pservers train a program, and apply its pushes as they come."""
    mode = active().catalog.mode
    return programs.is_trained(program) and mode is not None and mode.kind == ASYNC and mode.max_step_lag is None


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


def _feeds_of(
    caller: str, dataset: Any, source: Source, inputs: set[str], processes: Processes, num_skipped: int
) -> Generator[Feed, None, None]:
    """The feeds of a data set after the first `num_skipped`, which other threads make."""
    timeout_s = source.pipe.timeout_s + _GRACE_S
    if isinstance(dataset, IN_MEMORY):
        memory = memory_of(dataset)
        order = memory.order[num_skipped * source.batch_size :].copy()
        maker = partial(_from_memory, source, inputs, memory.held(caller), order, processes)
        return in_turns([maker], timeout_s, processes.end)
    makers = [partial(_from_files, source, inputs, paths, processes) for paths in source.shares()]
    return _after(num_skipped, in_turns(makers, timeout_s, processes.end))


def _after(num_skipped: int, feeds: Generator[Feed, None, None]) -> Generator[Feed, None, None]:
    with contextlib.closing(feeds):
        for _ in islice(feeds, num_skipped):
            pass
        yield from feeds


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


def _close(feeds: Generator[Feed, None, None]) -> None:
    with contextlib.suppress(ValueError):  # the thread that prepares them hangs in a file system
        feeds.close()


def _plan_to_look_ahead(program: pir.Program) -> RewritePlan | None:
    """The plan of a program that trains tables on ids of the data set; None if it need not pull rows early."""
    plan = programs.plan_of(program)
    if plan is None or not active().connection("exe.train_from_dataset").role.pserver_endpoints:
        return None  # a pserver inside this process answers at once
    return plan if any(all(plan.sites[site].fed_by for site in table.sites) for table in plan.tables) else None


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
        self._noting = threading.Lock()  # guards all below
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
        with self._noting:
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
