"""What `paddle.distributed.fleet` calls once roles are known: workers join a session, servers become pservers."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import paddle
from paddle.distributed.fleet.runtime.runtime_base import RuntimeBase

import fleet_sparse
from fleet_sparse.errors import PlanError

from .session import Role, active

logger = logging.getLogger(__name__)


class FleetSparseRuntime(RuntimeBase):  # type: ignore[misc]  # Paddle has no types
    """The runtime handle of a fleet in parameter-server mode. Method names and arguments are Paddle's."""

    def __init__(self, role_maker: Any, *, is_embedded: bool) -> None:
        super().__init__()
        self._role_maker = role_maker
        self._is_embedded = is_embedded
        self._load_dirname: str | None = None

    def role(self) -> Role:
        """Of this process, from its role maker."""
        if self._is_embedded:
            num_workers = os.environ.get("PADDLE_TRAINERS_NUM", "1")
            if num_workers != "1":
                raise PlanError(
                    f"init_worker: this job has {num_workers} workers and no pservers; each would train by itself. "
                    "Start it with fleetrun --server_num N --worker_num M"
                )
            return Role(0, 1, ())
        return Role(
            self._role_maker._worker_index(),
            self._role_maker._worker_num(),
            tuple(self._role_maker._get_pserver_endpoints()),
        )

    def _init_worker(self, scopes: Any = None) -> None:
        if scopes is not None:
            raise PlanError("init_worker: scopes are not supported; leave them out")
        active().connect(self.role(), paddle.static.global_scope())

    def _init_server(self, dirname: str | None = None, var_names: Any = None, **options: Any) -> None:
        if var_names is not None or options:
            raise PlanError("init_server: takes the directory of a snapshot and nothing else")
        self._load_dirname = dirname
        if self._is_embedded:
            active().load_dirname = dirname

    def _run_server(self) -> None:
        """Replaces this process by a pserver: same pid, same log, no Paddle in it. Does not return."""
        if self._is_embedded:
            raise PlanError(
                "run_server: this process is its own pserver; start with fleetrun to have pserver processes"
            )
        endpoints = self._role_maker._get_pserver_endpoints()
        shard = self._role_maker._server_index()
        arguments = ["--shard", str(shard), "--num-shards", str(len(endpoints))]
        arguments += ["--control", endpoints[shard], "--servers", ",".join(endpoints)]
        if self._load_dirname is not None:
            arguments += ["--load", self._load_dirname]
        sys.stdout.flush()
        sys.stderr.flush()
        os.environ["PYTHONPATH"] = _with_ourselves(os.environ.get("PYTHONPATH", ""))
        os.execv(sys.executable, [sys.executable, "-m", "fleet_sparse.pserver", *arguments])

    def _stop_worker(self) -> None:
        active().stop()

    def _save_persistables(
        self, executor: Any, dirname: str, main_program: Any = None, mode: int = 0, **options: Any
    ) -> None:
        if mode != 0 or options:
            raise PlanError(f"save_persistables: mode {mode} is not supported; only 0, all rows, is")
        active().save(dirname)

    def _save_inference_model(self, *_: Any, **__: Any) -> None:
        raise PlanError("save_inference_model: does not exist yet; use save_persistables and init_server(dirname)")

    def _load_persistables(self, path: str, mode: int = 0) -> None:
        raise PlanError("load_model: does not exist yet; give the directory to init_server(dirname)")

    def _shrink(self, threshold: Any = None) -> None:
        raise PlanError("shrink: does not exist yet")

    def _save_one_table(self, table_id: int, path: str, mode: int) -> None:
        raise PlanError("save_one_table: does not exist yet; use save_persistables")

    def _load_one_table(self, table_id: int, path: str, mode: int) -> None:
        raise PlanError("load_one_table: does not exist yet; give the directory to init_server(dirname)")


def _with_ourselves(path: str) -> str:
    """A PYTHONPATH on which the interpreter finds this very package, wherever it was imported from."""
    here = str(Path(fleet_sparse.__file__).resolve().parent.parent)
    return here if not path else path if here in path.split(os.pathsep) else os.pathsep.join([path, here])
