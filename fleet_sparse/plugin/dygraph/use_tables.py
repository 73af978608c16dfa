"""use_tables: one line with which a dygraph script without fleet trains its sparse embeddings as tables."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import Any, NoReturn

import paddle
from paddle.distributed import fleet as fleet_module

from fleet_sparse.errors import PlanError

from ..install import install
from .training import training

_has_failed = threading.Event()


def use_tables(strategy: Any = None, *, load: str | None = None, save: str | None = None) -> None:
    """Makes every `paddle.nn.Embedding(sparse=True)` that is built later a table, and its optimizer train it.

    It takes the place of all calls of fleet in a dygraph script. Under `fleetrun` a server process becomes a pserver
    here; a script that runs alone has a pserver inside. A worker connects with the first lookup, and the optimizer that
    was built before trains all tables and its parameters. When the script ends, worker 0 saves, and the job stops.

    Args:
        strategy: `fleet_sparse.PserverStrategy` or `fleet.DistributedStrategy`; None for synchronous training.
        load: Directory of the snapshot to begin with; None for none.
        save: Directory of the snapshot that is made when the script ends without an error; None for none.

    Raises:
        PlanError: Paddle is in static graph mode, or a field of the strategy is not supported.
    """
    install()
    if not paddle.in_dynamic_mode():
        raise PlanError("use_tables: Paddle is in static graph mode. Call it in dygraph, or use fleet there")
    fleet = fleet_module.fleet
    fleet.init(strategy=strategy)
    if fleet.is_server():
        fleet.init_server(load)
        fleet.run_server()
        return
    if load is not None:
        fleet.init_server(load)
    training().begin = fleet.init_worker
    _watch_for_failure()
    atexit.register(_end, save)


def set_num_examples(num_examples: int) -> None:
    """States the number of examples of the batches whose `optimizer.step()` follows.

    Sync training of several workers weights their gradients by it. By default it is the first dimension of the ids,
    which must then be the same in all lookups of the step.
    """
    training().set_num_examples(num_examples)


def _watch_for_failure() -> None:
    """Notes an error that ends the script, and `sys.exit` with a status other than 0."""
    stock_hook, stock_exit = sys.excepthook, sys.exit

    def hook(*error: Any) -> None:
        if not hasattr(sys, "ps1"):  # an interactive session goes on after an error
            _has_failed.set()
        stock_hook(*error)

    def exit_script(status: Any = None, /) -> NoReturn:
        if status not in (None, 0):
            _has_failed.set()
        stock_exit(status)

    sys.excepthook, sys.exit = hook, exit_script


def _end(save: str | None) -> None:
    """Saves and stops after the last line of the script; after an error the other workers find out by themselves."""
    if _has_failed.is_set() or training().begin is not None:  # an error, or no lookup
        return
    fleet = fleet_module.fleet
    if save is not None:
        fleet.save_persistables(None, os.fspath(save))
    fleet.stop_worker()
