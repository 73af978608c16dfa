"""Refuses by name to write a Program with lookups to a file: rows of tables are no part of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import paddle
from paddle.base.libpaddle import pir

from fleet_sparse.errors import PlanError

from ..active_session import active
from . import programs


def wrap_save(name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `paddle.static.save` or `save_inference_model`.

    Raises:
        PlanError: The program looks rows up on the pservers.
    """
    signature = inspect.signature(stock)

    @wraps(stock)
    def save(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        program = arguments.get("program") or arguments.get("kwargs", {}).get("program")
        program = program or paddle.static.default_main_program()
        if isinstance(program, pir.Program) and programs.pulls(active(), program):
            raise PlanError(
                f"paddle.static.{name}: a program does not contain rows of tables, and lookups in them cannot be "
                "written to a file. Write fleet.save_inference_model(exe, dirname, feeds, targets) for a model to "
                "predict with, fleet.save_persistables(exe, dirname) for all values"
            )
        return stock(*args, **kwargs)

    return save
