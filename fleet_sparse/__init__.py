"""Parameter-server training for PaddlePaddle 3.x: embedding tables of any size, on pservers.

Names are imported when they are asked for, so that a pserver process never imports Paddle.

`import fleet_sparse; fleet_sparse.install()` makes `paddle.distributed.fleet` train flagged embeddings; `import
fleet_sparse as fleet` does the same and stands in for `paddle.distributed.fleet`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "DatasetError",
    "FleetSparseError",
    "Forbidden",
    "InstallError",
    "LeaseLost",
    "LogCorrupt",
    "LogFailed",
    "LogFull",
    "PlanError",
    "ProtocolError",
    "PserverOptimizer",
    "PserverStrategy",
    "PushRefused",
    "RowCache",
    "SettingError",
    "Settings",
    "ShardUnavailable",
    "SnapshotCorrupt",
    "SnapshotError",
    "TableMismatch",
    "WorkerLost",
    "describe",
    "entry",
    "install",
    "look_ahead",
    "pooled_embedding",
    "resumable",
    "resume",
    "resume_step",
    "save",
    "save_every",
    "shrink",
    "stats",
    "uninstall",
]

_HOMES = {
    "PserverOptimizer": "fleet_sparse.plugin.optimizer",
    "PserverStrategy": "fleet_sparse.plugin.strategy",
    "RowCache": "fleet_sparse.plugin.row_cache",
    "Settings": "fleet_sparse.settings",
    "describe": "fleet_sparse.transpiler.describe",
    "entry": "fleet_sparse.plugin.entry_config",
    "install": "fleet_sparse.plugin.install",
    "look_ahead": "fleet_sparse.plugin.look_ahead",
    "pooled_embedding": "fleet_sparse.plugin.static.pooling",
    "resumable": "fleet_sparse.plugin.resumable",
    "resume": "fleet_sparse.plugin.save_calls",
    "resume_step": "fleet_sparse.plugin.save_calls",
    "save": "fleet_sparse.plugin.save_calls",
    "save_every": "fleet_sparse.plugin.save_calls",
    "shrink": "fleet_sparse.plugin.save_calls",
    "stats": "fleet_sparse.plugin.active_session",
    "uninstall": "fleet_sparse.plugin.install",
}

# What `import fleet_sparse as fleet` takes over from paddle.distributed.fleet.
_FLEET = frozenset(
    [
        "DistributedStrategy",
        "Fleet",
        "MultiSlotDataGenerator",
        "MultiSlotStringDataGenerator",
        "PaddleCloudRoleMaker",
        "Role",
        "UserDefinedRoleMaker",
        "UtilBase",
        "all_reduce",
        "barrier_worker",
        "check_save_pre_patch_done",
        "distributed_model",
        "distributed_optimizer",
        "init",
        "init_server",
        "init_worker",
        "is_first_worker",
        "is_server",
        "is_worker",
        "load_inference_model",
        "load_model",
        "load_one_table",
        "minimize",
        "nranks",
        "print_table_stat",
        "rank",
        "run_server",
        "save_cache_model",
        "save_cache_table",
        "save_dense_params",
        "save_inference_model",
        "save_one_table",
        "save_persistables",
        "server_endpoints",
        "server_index",
        "server_num",
        "set_date",
        "stop_worker",
        "util",
        "worker_endpoints",
        "worker_index",
        "worker_num",
        "world_size",
    ]
)

if TYPE_CHECKING:
    from fleet_sparse import nn as nn
    from fleet_sparse.errors import (
        DatasetError,
        FleetSparseError,
        Forbidden,
        InstallError,
        LeaseLost,
        LogCorrupt,
        LogFailed,
        LogFull,
        PlanError,
        ProtocolError,
        PushRefused,
        SettingError,
        ShardUnavailable,
        SnapshotCorrupt,
        SnapshotError,
        TableMismatch,
        WorkerLost,
    )
    from fleet_sparse.plugin.active_session import stats
    from fleet_sparse.plugin.entry_config import entry
    from fleet_sparse.plugin.install import install, uninstall
    from fleet_sparse.plugin.look_ahead import look_ahead
    from fleet_sparse.plugin.optimizer import PserverOptimizer
    from fleet_sparse.plugin.resumable import resumable
    from fleet_sparse.plugin.row_cache import RowCache
    from fleet_sparse.plugin.save_calls import resume, resume_step, save, save_every, shrink
    from fleet_sparse.plugin.static.pooling import pooled_embedding
    from fleet_sparse.plugin.strategy import PserverStrategy
    from fleet_sparse.settings import Settings
    from fleet_sparse.transpiler.describe import describe
else:

    def __getattr__(name: str) -> Any:
        if name in __all__:
            return getattr(_import(_HOMES.get(name, "fleet_sparse.errors")), name)
        if name == "nn":  # imports Paddle
            return _import("fleet_sparse.nn")
        if name in _FLEET:
            _import("fleet_sparse.plugin.install").install()
            return getattr(_import("paddle.distributed.fleet"), name)
        raise AttributeError(f"module 'fleet_sparse' has no attribute {name!r}")

    def _import(module: str) -> Any:
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != "paddle":
                raise
            from fleet_sparse.errors import InstallError

            raise InstallError(
                "paddle is not installed; pip install 'fleet-sparse[cpu]', or a paddlepaddle-gpu 3.3"
            ) from None


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, *_FLEET])
