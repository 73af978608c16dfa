"""FleetSparseRuntime: the runtime handle that `paddle.distributed.fleet` delegates to in parameter-server mode."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from paddle.base.libpaddle import pir
from paddle.distributed.fleet.runtime.runtime_base import RuntimeBase

from fleet_sparse.errors import PlanError
from fleet_sparse.worker.control.save import DELTA, FULL

from .active_session import active
from .connection import JobConnection, Role
from .dygraph.training import current_scope, training
from .inference_model import ModelRequest, load_inference_model, save_inference_model
from .online import left_out_of, save_cache_model, shrink_tables
from .session import Session
from .static.programs import names_in
from .supervised_script import report_joined, with_this_package

_log = logging.getLogger(__name__)

# By Paddle's mode: kind of the snapshot, and whether a day of the tables ends.
_SAVES = {0: (FULL, False), 1: (DELTA, False), 2: (FULL, False), 3: (FULL, True)}

_NOT_FEDERATED = "federated learning is not supported. Train with fleet.init_worker() and exe.run"


class FleetSparseRuntime(RuntimeBase):  # type: ignore[misc]  # Paddle has no types
    """Connects workers, and turns server processes into pservers. Method names and arguments are Paddle's."""

    def __init__(self, role_maker: Any, *, is_embedded: bool) -> None:
        super().__init__()
        self._role_maker = role_maker
        self._is_embedded = is_embedded
        self._load_dirname: str | None = None
        self._load_tables: tuple[str, ...] = ()

    @property
    def _session(self) -> Session:
        return active()

    def _connection(self, caller: str) -> JobConnection:
        return self._session.connection(caller)

    @property
    def num_pserver_processes(self) -> int:
        """Number of pserver processes of the job; 0 if its pserver is inside this process."""
        return 0 if self._is_embedded else len(self._role_maker._get_pserver_endpoints())

    @property
    def num_workers(self) -> int:
        """Number of workers of the job."""
        return 1 if self._is_embedded else int(self._role_maker._worker_num())

    def role(self) -> Role:
        """The role of this worker, from Paddle's role maker."""
        if self._is_embedded:
            num_workers = os.environ.get("PADDLE_TRAINERS_NUM", "1")
            if num_workers != "1":
                raise PlanError(
                    f"init_worker: this job has {num_workers} workers and no pservers, so that each would train alone. "
                    "Start it with fleetrun --server_num N --worker_num M"
                )
            return Role(0, 1, ())
        return Role(
            self._role_maker._worker_index(),
            self._role_maker._worker_num(),
            tuple(self._role_maker._get_pserver_endpoints()),
            tuple(self._role_maker._get_trainer_endpoints()),
        )

    def _init_worker(self, scopes: Any = None) -> None:
        if scopes is not None:
            raise PlanError("init_worker: scopes are not supported. Leave them out")
        self._session.check_minimized("init_worker")
        training().prepare()
        self._session.connect(self.role(), current_scope())
        report_joined()
        if self._is_embedded and self._load_tables:
            assert self._load_dirname is not None, "var_names come with a directory"
            self._load(self._load_dirname, tables=self._load_tables, caller="init_server")

    def _init_server(self, dirname: str | None = None, var_names: Sequence[str] | None = None, **options: Any) -> None:
        if options:
            raise PlanError(f"init_server: {', '.join(options)}: is not supported. Leave it out")
        if var_names and dirname is None:
            raise PlanError(f"init_server: var_names is {list(var_names)} without a dirname, should have one")
        self._session.check_minimized("init_server")
        self._load_dirname, self._load_tables = dirname, tuple(var_names or ())
        if self._is_embedded:
            self._session.load_at_start(None if self._load_tables else dirname)

    def _run_server(self) -> None:
        """Replaces this process by a pserver, or by its supervisor: same pid, same log, no Paddle. Does not return."""
        if self._is_embedded:
            raise PlanError(
                "run_server: this process has its pserver inside. Start the job with fleetrun to have pserver processes"
            )
        endpoints = self._role_maker._get_pserver_endpoints()
        shard = self._role_maker._server_index()
        arguments = ["--shard", str(shard), "--num-shards", str(len(endpoints))]
        arguments += ["--control", endpoints[shard], "--servers", ",".join(endpoints), "--supervised"]
        if self._load_dirname is not None:
            arguments += ["--load", self._load_dirname]
            for name in self._load_tables:
                arguments += ["--load-table", name]
        sys.stdout.flush()
        sys.stderr.flush()
        os.environ["PYTHONPATH"] = with_this_package(os.environ.get("PYTHONPATH", ""))
        os.execv(sys.executable, [sys.executable, "-m", "fleet_sparse.pserver", *arguments])

    def _stop_worker(self) -> None:
        self._session.stop()

    def _save_persistables(
        self, executor: Any, dirname: str, main_program: Any = None, mode: int = 0, **options: Any
    ) -> None:
        if mode not in _SAVES or options:
            raise PlanError(
                f"save_persistables: mode {mode!r}{' with options' if options else ''} is not supported. Write mode=0 "
                "for all rows, 1 for the rows that changed since the last save, 2 for a base model without rare rows, "
                "3 for all rows at the end of a day"
            )
        _check_program(self._session, main_program)
        kind, ends_day = _SAVES[mode]
        where = os.fspath(dirname)
        caller, snapshots = "save_persistables", self._session.snapshots
        keep_last = snapshots.keep_last_of(where)
        snapshots.save(
            self._connection(caller),
            where,
            kind,
            keep_last=keep_last,
            ends_day=ends_day,
            left_out=left_out_of(self._session, mode),
            caller=caller,
        )

    def _load_persistables(self, path: str, mode: int = 0) -> None:
        _check_mode("load_model", mode)
        self._load(path, caller="load_model")

    def _save_one_table(self, table_id: int | str, path: str, mode: int) -> None:
        _check_mode("save_one_table", mode)
        caller, name = "save_one_table", self._session.catalog.name_of_table(table_id)
        # Keeps all: other snapshots in the directory may be of the whole job.
        self._session.snapshots.save(
            self._connection(caller), os.fspath(path), FULL, keep_last=None, tables=[name], caller=caller
        )

    def _load_one_table(self, table_id: int | str, path: str, mode: int) -> None:
        _check_mode("load_one_table", mode)
        self._load(path, tables=[self._session.catalog.name_of_table(table_id)], caller="load_one_table")

    def _load(self, path: str, *, tables: Sequence[str] = (), caller: str) -> None:
        self._session.snapshots.load(
            self._connection(caller), os.fspath(path), current_scope(), tables=tables, caller=caller
        )

    def _shrink(self, threshold: int | None = None) -> None:
        shrink_tables(self._session, threshold)

    def _save_inference_model(
        self,
        executor: Any,
        dirname: str,
        feeded_var_names: Any,
        target_vars: Any,
        main_program: Any = None,
        export_for_deployment: bool = True,
        mode: int = 0,
    ) -> None:
        save_inference_model(
            self._session,
            ModelRequest(dirname, feeded_var_names, target_vars, main_program, export_for_deployment, mode),
            executor,
        )

    def _load_inference_model(self, path: str, mode: int) -> None:
        load_inference_model(self._session, path, mode)

    def _save_dense_params(self, *_: Any, **__: Any) -> None:
        raise PlanError(
            "save_dense_params: dense parameters are saved with the tables. Write fleet.save_persistables(exe, dirname)"
        )

    def _save_cache_model(self, dirname: str, mode: int = 1, table_id: int | str = 0, **options: Any) -> int:
        """Saves the rows of a table that a base model would have and that were shown most often.

        Returns:
            Their number on worker 0; -1 on the other workers, as in Paddle.
        """
        if options:
            raise PlanError(f"save_cache_model: {', '.join(options)}: is not supported. Leave it out")
        return save_cache_model(self._session, os.fspath(dirname), table_id)

    def _save_cache_table(self, table_id: int | str, pass_id: Any, mem_cache_key_threshold: int = 0) -> None:
        """Does nothing: in Paddle it moves rows from memory to a disk, and tables here lie in memory."""
        name = self._session.catalog.name_of_table(table_id)
        _log.info("save_cache_table: table %r lies in memory as a whole, nothing is moved", name)

    def _init_coordinator(self, scopes: Any = None) -> None:
        raise PlanError(f"init_coordinator: {_NOT_FEDERATED}")

    def _make_fl_strategy(self) -> None:
        raise PlanError(f"make_fl_strategy: {_NOT_FEDERATED}")

    @property
    def _worker(self) -> Any:
        raise PlanError(f"get_fl_client: {_NOT_FEDERATED}")

    def _set_date(self, *_: Any, **__: Any) -> None:
        raise PlanError(
            "set_date: there are no tables on GPUs. A day of a table ends with "
            "fleet.save_persistables(exe, dirname, mode=3)"
        )

    def _print_table_stat(self, *_: Any, **__: Any) -> None:
        raise PlanError("print_table_stat: there are no tables on GPUs. Write fleet_sparse.stats()")

    def _check_save_pre_patch_done(self) -> None:
        """Returns when the save that is under way is complete, on worker 0; at once on the others."""
        with self._session.snapshots.queue.none_under_way():
            pass


def _check_program(session: Session, main_program: Any) -> None:
    """Refuses a main program that is not the whole job, because a save is of the whole job."""
    if main_program is None:
        return
    if not isinstance(main_program, pir.Program):
        raise PlanError(f"save_persistables: main_program is a {type(main_program).__name__}, should be a Program")
    if others := session.catalog.trained_names() - names_in(session, main_program):
        raise PlanError(
            f"save_persistables: {min(others)!r} is not in main_program, but a save is of the whole job. Give the "
            "program that was minimized, or leave main_program out; fleet.save_one_table(table, dirname, 0) saves one "
            "table"
        )


def _check_mode(caller: str, mode: int) -> None:
    if mode != 0:
        raise PlanError(f"{caller}: mode {mode!r} is not supported. Write mode=0: all rows with their optimizer state")
