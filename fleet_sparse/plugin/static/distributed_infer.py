"""`paddle.distributed.fleet.utils.DistributedInfer`: a program that only evaluates, with tables on the pservers."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import paddle
from paddle.base.libpaddle import pir
from paddle.distributed import fleet

from ..active_session import active
from . import programs
from .sparse_tables import tables_of


def wrap_init(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `DistributedInfer.__init__`: sparse embeddings of the program become tables that nothing trains."""

    @wraps(stock)
    def init(self: Any, main_program: Any = None, startup_program: Any = None) -> None:
        if paddle.in_dynamic_mode() or not paddle.framework.in_pir_mode():
            stock(self, main_program, startup_program)
            return
        program = main_program or paddle.static.default_main_program()
        startup_program = startup_program or paddle.static.default_startup_program()
        catalog = active().catalog
        catalog.declare_layers(tables_of(program, startup_program, catalog.layers))
        self.origin_main_program = programs.clone_for_test(program)
        self.origin_startup_program = startup_program
        self.sparse_table_maps = None

    return init


def wrap_init_env(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `DistributedInfer.init_distributed_infer_env`: starts or joins the job; the pservers load `dirname`."""

    @wraps(stock)
    def init_distributed_infer_env(self: Any, exe: Any, loss: Any, role_maker: Any = None, dirname: Any = None) -> None:
        if not isinstance(self.origin_main_program, pir.Program):
            stock(self, exe, loss, role_maker, dirname)
            return
        if fleet.fleet._runtime_handle is not None:  # the script has done all of it
            return
        fleet.init(role_maker)
        fleet.init_server(dirname)
        if fleet.is_server():
            fleet.run_server()
        exe.run(self.origin_startup_program)
        fleet.init_worker()

    return init_distributed_infer_env


def wrap_get_program(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `DistributedInfer.get_dist_infer_program`: the forward part, which pulls rows and trains nothing."""

    @wraps(stock)
    def get_dist_infer_program(self: Any) -> Any:
        program = self.origin_main_program
        return program if isinstance(program, pir.Program) else stock(self)

    return get_dist_infer_program
