"""The thin wrapper around `Executor.run`: prepares the program, lets our errors come out as ours, saves when due."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import paddle
from paddle.base.libpaddle import pir

from fleet_sparse.errors import PlanError
from fleet_sparse.transpiler.raw_op import take_failure

from ..session import active
from . import programs


def wrap_run(stock_run: Callable[..., Any]) -> Callable[..., Any]:
    """`Executor.run` with the same arguments and results.

    Raises (besides what Paddle raises):
        FleetSparseError: What went wrong inside one of our ops; Paddle alone would raise a `SystemError`.
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
        session = active()
        scope = call.arguments["scope"] or paddle.static.global_scope()
        target = programs.to_run(program)
        if target.has_lookups:
            session.refresh_dense(scope, trains=target.is_trained)
        call.arguments["program"] = target.program
        call.arguments["fetch_list"] = programs.current(program, call.arguments["fetch_list"])
        try:
            results = stock_run(*call.args, **call.kwargs)
        except Exception as error:
            failure = take_failure()
            if failure is None:
                raise
            raise failure from _unless_ours(error)
        if not target.has_lookups:
            session.share_dense(scope)
        if target.is_trained:
            session.note_run()
        return results

    return run


def wrap_dataset_run(name: str, stock_run: Callable[..., Any]) -> Callable[..., Any]:
    """`Executor.train_from_dataset` or `infer_from_dataset`, which know nothing of the programs of today's Paddle.

    Raises:
        PlanError: The program is one of those.
    """

    @wraps(stock_run)
    def run(self: Any, program: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(program or paddle.static.default_main_program(), pir.Program):
            raise PlanError(
                f"exe.{name}: Paddle {paddle.__version__} runs no program of its new IR on a dataset. Write a loop of "
                "exe.run over batches, as those of paddle.io.DataLoader"
            )
        return stock_run(self, program, *args, **kwargs)

    return run


def _unless_ours(error: Exception) -> Exception | None:
    """Paddle's own error, unless it only says that our op failed."""
    return None if isinstance(error, SystemError) else error
