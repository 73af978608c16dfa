"""The wrapper around `Executor.run`: prepares the program, raises our errors as ours, and begins scheduled saves."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

import paddle
from paddle.base.libpaddle import pir

from fleet_sparse.transpiler.raw_op import take_failure

from ..active_session import active
from ..datasets.runs import Options, run_from_dataset
from . import programs
from .generator_loader import feed_of


def wrap_run(stock_run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `Executor.run`; arguments and results stay the same.

    Raises (in addition to Paddle's errors):
        FleetSparseError: An op of ours failed; Paddle alone would raise a `SystemError`.
    """

    signature = inspect.signature(stock_run)

    @wraps(stock_run)
    def run(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        program = call.arguments["program"]
        program = paddle.static.default_main_program() if program is None else program
        if not isinstance(program, pir.Program):
            return stock_run(*args, **kwargs)
        if not call.arguments["feed"] and (feed := feed_of(program)) is not None:
            call.arguments["feed"] = feed
        session = active()
        scope = call.arguments["scope"] or paddle.static.global_scope()
        target = programs.to_run(session, program)
        if target.has_lookups:
            session.last_feed = call.arguments["feed"]
            session.before_run(scope, trains=target.is_trained)
        if target.is_trained:
            session.before_training(scope, target.dense)
        call.arguments["program"] = target.program
        call.arguments["fetch_list"] = programs.current(program, call.arguments["fetch_list"])
        if target.is_trained:
            session.step_ids.begin_run()
        try:
            with session.dense.step(scope, target.dense) if target.is_trained else nullcontext():
                results = stock_run(*call.args, **call.kwargs)
        except Exception as error:
            failure = take_failure()
            if failure is None:
                raise
            raise failure from _unless_ours(error)
        finally:
            if target.is_trained:
                session.step_ids.end_run()
        session.after_run(scope, has_lookups=target.has_lookups, trains=target.is_trained)
        return results

    return run


def wrap_dataset_run(stock_run: Callable[..., Any], *, trains: bool) -> Callable[..., Any]:
    """Wraps `Executor.train_from_dataset` or `infer_from_dataset`; Paddle's own run no program of its new IR.

    Raises:
        PlanError: An argument or a setting of the data set is not supported.
        DatasetError: A file or its `pipe_command` is wrong.
    """

    @wraps(stock_run)
    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        run_from_dataset(self, f"exe.{stock_run.__name__}", Options(*args, **kwargs), trains=trains)

    return run


def _unless_ours(error: Exception) -> Exception | None:
    """Paddle's own error, unless it only reports that our op failed."""
    return None if isinstance(error, SystemError) else error
