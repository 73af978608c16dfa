"""The thin wrapper around `Executor.run`: prepares the program, and lets our errors come out as ours."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import paddle
from paddle.base.libpaddle import pir

from fleet_sparse.transpiler.raw_op import take_failure

from . import programs
from .session import active


def wrap_run(stock_run: Callable[..., Any]) -> Callable[..., Any]:
    """`Executor.run` with the same arguments and results.

    Raises (besides what Paddle raises):
        FleetSparseError: What went wrong inside one of our ops; Paddle alone would raise a `SystemError`.
    """

    @wraps(stock_run)
    def run(
        executor: Any, program: Any = None, feed: Any = None, fetch_list: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        target = paddle.static.default_main_program() if program is None else program
        if not isinstance(target, pir.Program):
            return stock_run(executor, program, feed, fetch_list, *args, **kwargs)
        session = active()
        scope = kwargs.get("scope") or paddle.static.global_scope()
        looks_up = programs.prepare(target)
        if looks_up and not programs.is_trained(target):
            session.refresh_dense(scope)
        try:
            results = stock_run(executor, program, feed, programs.current(target, fetch_list), *args, **kwargs)
        except Exception as error:
            failure = take_failure()
            if failure is None:
                raise
            raise failure.with_traceback(failure.__traceback__) from _unless_ours(error)
        session.share_dense(scope)
        return results

    return run


def _unless_ours(error: Exception) -> Exception | None:
    """Paddle's own error, unless it only says that our op failed."""
    return None if isinstance(error, SystemError) else error
