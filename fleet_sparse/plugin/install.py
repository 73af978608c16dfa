"""`install()` replaces functions of Paddle by those of fleet_sparse; `uninstall()` restores them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import paddle
from paddle.base.libpaddle import pir
from paddle.distributed import fleet as fleet_module
from paddle.distributed.fleet import DistributedStrategy
from paddle.distributed.fleet import metrics as fleet_metrics
from paddle.distributed.fleet.base.role_maker import PaddleCloudRoleMaker
from paddle.distributed.fleet.fleet import Fleet
from paddle.distributed.fleet.utils.ps_util import DistributedInfer
from paddle.optimizer import Optimizer

from fleet_sparse.errors import PlanError
from fleet_sparse.transpiler.scan import scan

from . import active_session
from .active_session import active
from .collectives import all_gather, all_reduce, check_world
from .datasets import memory_calls
from .dygraph import fleet_calls
from .dygraph.training import current_scope, training
from .paddle_support import check_flags, check_version
from .runtime import FleetSparseRuntime
from .static import embedding, executor, programs
from .static.auc import wrap_auc
from .static.ctr_layers import data_norm, wrap_continuous_value_model
from .static.ctr_metrics import wrap_ctr_metric_bundle
from .static.distributed_infer import wrap_get_program, wrap_init, wrap_init_env
from .static.fleet_opt import fleet_opt
from .static.generator_loader import from_generator
from .static.global_var import wrap_create_global_var
from .static.metrics import METRICS, wrap_metric
from .static.minimize import minimize
from .static.program_files import wrap_save
from .static.sequence_pool import wrap_sequence_pool
from .static.value_name import with_names
from .strategy import watched_build_strategy
from .supervised_script import supervise_script

_ABSENT = object()


class _Patch(NamedTuple):
    owner: Any
    name: str
    stock: Any
    """`_ABSENT` if Paddle does not have it."""


_patches: list[_Patch] = []


def install() -> None:
    """Makes flagged embeddings and the parameter-server mode of fleet work; a second call does nothing.

    Raises:
        InstallError: The version of Paddle is not supported, or training is wrong with one of its flags.
    """
    if _patches:
        return
    supervise_script()
    check_version(paddle.__version__)
    check_flags()
    fleet = fleet_module.fleet
    _replace(paddle.static.nn, "embedding", embedding.embedding)
    _replace(paddle.static.nn, "sparse_embedding", embedding.sparse_embedding)
    _replace(paddle.static.Executor, "run", executor.wrap_run(paddle.static.Executor.run))
    for name, trains in (("train_from_dataset", True), ("infer_from_dataset", False)):
        stock = getattr(paddle.static.Executor, name)
        _replace(paddle.static.Executor, name, executor.wrap_dataset_run(stock, trains=trains))
    for kind, name, ours in (*memory_calls.replaced_methods(), *fleet_calls.replaced_methods()):
        _replace(kind, name, ours)
    for name in ("save", "save_inference_model"):
        _replace(paddle.static, name, wrap_save(name, getattr(paddle.static, name)))
    _restore_paddle_2()
    _replace(pir.Program, "clone", _wrap_clone(pir.Program.clone))
    _replace(DistributedStrategy, "build_strategy", watched_build_strategy(DistributedStrategy.build_strategy))
    _replace(Optimizer, "backward", _wrap_backward(Optimizer.backward))
    _replace(Fleet, "init", _wrap_init(Fleet.init))
    _replace(Fleet, "barrier_worker", _wrap_barrier(Fleet.barrier_worker))
    _replace(Fleet, "_minimize_impl", _wrap_minimize(Fleet._minimize_impl))
    _replace(Fleet, "_minimize_losses_impl", _wrap_minimize_losses(Fleet._minimize_losses_impl))
    _replace(PaddleCloudRoleMaker, "_all_gather", _wrap_all_gather(PaddleCloudRoleMaker._all_gather))
    _replace(PaddleCloudRoleMaker, "_all_reduce", _wrap_all_reduce(PaddleCloudRoleMaker._all_reduce))
    _replace(PaddleCloudRoleMaker, "_barrier", _wrap_util_barrier(PaddleCloudRoleMaker._barrier))
    _replace(DistributedInfer, "__init__", wrap_init(DistributedInfer.__init__))
    _replace(DistributedInfer, "init_distributed_infer_env", wrap_init_env(DistributedInfer.init_distributed_infer_env))
    _replace(DistributedInfer, "get_dist_infer_program", wrap_get_program(DistributedInfer.get_dist_infer_program))
    # The module has these two as bound methods of the unpatched class.
    _replace(fleet_module, "init", fleet.init)
    _replace(fleet_module, "barrier_worker", fleet.barrier_worker)
    _adopt(fleet)  # in case fleet.init() was called before install()


def uninstall() -> None:
    """Restores Paddle's functions and drops the session. Programs that were built in between no longer run."""
    while _patches:
        patch = _patches.pop()
        if patch.stock is _ABSENT:
            delattr(patch.owner, patch.name)
        else:
            setattr(patch.owner, patch.name, patch.stock)
    active_session.forget()


def is_installed() -> bool:
    """Returns whether `install` is in effect."""
    return bool(_patches)


def _replace(owner: Any, name: str, ours: Any) -> None:
    _patches.append(_Patch(owner, name, getattr(owner, name, _ABSENT)))
    setattr(owner, name, ours)


def _restore_paddle_2() -> None:
    """Restores what programs of Paddle 2 use and Paddle 3 dropped, or left out of its new IR."""
    _replace(paddle.static, "auc", wrap_auc(paddle.static.auc))
    _replace(paddle.static, "ctr_metric_bundle", wrap_ctr_metric_bundle(paddle.static.ctr_metric_bundle))
    _replace(paddle.static.nn, "sequence_pool", wrap_sequence_pool(paddle.static.nn.sequence_pool))
    cvm = "continuous_value_model"
    _replace(paddle.static.nn, cvm, wrap_continuous_value_model(getattr(paddle.static.nn, cvm)))
    if not hasattr(paddle.static.nn, "data_norm"):
        _replace(paddle.static.nn, "data_norm", data_norm)
    _replace(paddle.static, "create_global_var", wrap_create_global_var(paddle.static.create_global_var))
    for name in METRICS:
        _replace(fleet_metrics, name, wrap_metric(getattr(fleet_metrics, name)))
    _replace(paddle.io.DataLoader, "from_generator", staticmethod(from_generator))
    _replace(pir.Program, "_fleet_opt", fleet_opt)
    _replace(pir.Value, "name", with_names(pir.Value.name))


def _wrap_init(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def init(self: Any, role_maker: Any = None, is_collective: bool = False, *args: Any, **kwargs: Any) -> Any:
        has_pservers = not (is_collective if role_maker is None else role_maker._is_collective)
        is_dygraph_job = paddle.in_dynamic_mode() and has_pservers
        if is_dygraph_job:
            result = fleet_calls.init_without_collectives(stock, self, role_maker, is_collective, *args, **kwargs)
        else:
            result = stock(self, role_maker, is_collective, *args, **kwargs)
        _adopt(self)
        if is_dygraph_job:
            training().is_initialized = True
        return result

    return init


def _adopt(fleet: Any) -> None:
    """Sets the runtime of a fleet that was initialised for parameter-server mode."""
    if fleet._role_maker is None or fleet._is_collective:
        return
    is_embedded = fleet._role_maker._is_non_distributed()
    # Paddle skips init_worker, save and similar calls for a single process; ours has a pserver inside.
    fleet._role_maker._non_distributed = False
    fleet._runtime_handle = FleetSparseRuntime(fleet._role_maker, is_embedded=is_embedded)


def _wrap_barrier(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def barrier_worker(self: Any) -> None:
        if isinstance(self._runtime_handle, FleetSparseRuntime):
            _barrier_of(self._runtime_handle)
        else:
            stock(self)

    return barrier_worker


def _barrier_of(runtime: FleetSparseRuntime) -> None:
    if not active().barrier_before_connecting(runtime.role()):
        active().barrier(current_scope())


def _uses_control_plane(role_maker: Any) -> bool:
    """Returns whether the workers of a role maker have pservers of ours and no Gloo."""
    fleet = fleet_module.fleet
    is_ours = isinstance(fleet._runtime_handle, FleetSparseRuntime) and fleet._role_maker is role_maker
    return is_ours and not role_maker._gloo._is_initialized


def _wrap_all_gather(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def _all_gather(self: Any, input: Any, comm_world: str = "worker") -> Any:
        if not _uses_control_plane(self):
            return stock(self, input, comm_world)
        check_world("fleet.util.all_gather", comm_world)
        return all_gather(active().connection("fleet.util.all_gather"), input)

    return _all_gather


def _wrap_all_reduce(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def _all_reduce(self: Any, input: Any, mode: str = "sum", comm_world: str = "worker") -> Any:
        if not _uses_control_plane(self):
            return stock(self, input, mode, comm_world)
        check_world("fleet.util.all_reduce", comm_world)
        return all_reduce(active().connection("fleet.util.all_reduce"), input, mode)

    return _all_reduce


def _wrap_util_barrier(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def _barrier(self: Any, comm_world: str) -> None:
        if not _uses_control_plane(self):
            stock(self, comm_world)
            return
        check_world("fleet.util.barrier", comm_world)
        _barrier_of(fleet_module.fleet._runtime_handle)

    return _barrier


def _wrap_minimize(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def _minimize_impl(
        self: Any, loss: Any, startup_program: Any = None, parameter_list: Any = None, no_grad_set: Any = None
    ) -> Any:
        if paddle.in_dynamic_mode() or not isinstance(self._runtime_handle, FleetSparseRuntime):
            return stock(self, loss, startup_program, parameter_list, no_grad_set)
        if parameter_list is not None:
            raise PlanError(
                "minimize: parameter_list is not supported. Set trainable=False on parameters that "
                "should not be trained"
            )
        return minimize(
            active(),
            loss,
            self.user_defined_optimizer,
            self._user_defined_strategy,
            startup_program,
            no_grad_set,
            num_pserver_processes=self._runtime_handle.num_pserver_processes,
            num_workers=self._runtime_handle.num_workers,
        )

    return _minimize_impl


def _wrap_minimize_losses(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def _minimize_losses_impl(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self._runtime_handle, FleetSparseRuntime):
            raise PlanError("minimize: a list of losses is not supported. Add them up to one loss")
        return stock(self, *args, **kwargs)

    return _minimize_losses_impl


def _wrap_backward(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def backward(self: Any, loss: Any, startup_program: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(loss, pir.Value):
            program = loss.block.program
            if programs.is_trained(program):
                raise PlanError("minimize: this Program trains on pservers already. Build the model in another Program")
            sites = scan(program).sites
            if sites:
                raise PlanError(
                    f"{sites[0]}: {type(self).__name__} alone would not train the table. "
                    "Write fleet.distributed_optimizer(optimizer, strategy).minimize(loss)"
                )
            # The minimize of fleet calls this too, and then notes the opposite.
            programs.note_outside_fleet(program, startup_program or paddle.static.default_startup_program())
            active().note_outside_fleet(type(self).__name__)
        return stock(self, loss, startup_program, *args, **kwargs)

    return backward


def _wrap_clone(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def clone(self: Any, *args: Any, for_test: bool | None = None) -> Any:
        if args and isinstance(args[0], bool):
            for_test, args = args[0], args[1:]
        if for_test is None:
            return stock(self, *args)
        if programs.is_outside_fleet(self):
            return stock(self, *args, for_test=for_test)  # a TypeError of Paddle
        return programs.clone_for_test(self) if for_test else stock(self, *args)

    return clone
