"""PaddleGroup: the workers of a job as a process group of Paddle, Gloo or NCCL."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle.base import core

from fleet_sparse.errors import FleetSparseError, SettingError
from fleet_sparse.net_addresses import LOOPBACK, Address, is_local

_INTERFACE = "GLOO_SOCKET_IFNAME"
_GROUP_ID = 0
_POLL_S = 0.02
_FAILURES = (RuntimeError, SystemError, ValueError, OSError)  # of Paddle's groups and stores


class PaddleGroup:
    """Implements `WorkerGroup`. Worker 0 listens at the first endpoint until all are connected; nothing has keys.

    Gradients are added up on the GPU by NCCL if that is Paddle's device, else by Gloo.

    Args:
        endpoints: `host:port` of each worker, as in PADDLE_TRAINER_ENDPOINTS.
        worker_index: Index of this worker.
        num_workers: Number of workers.
        timeout_s: Seconds to wait for the other workers.
        insecure: True to connect workers of several machines.

    Raises:
        SettingError: The endpoints do not name worker 0's port, or are on several machines without `insecure`.
        FleetSparseError: The workers were not connected in time. The process must be restarted: on worker 0 a thread
            that nothing interrupts may wait for the others, and listens meanwhile.
    """

    def __init__(
        self, endpoints: Sequence[str], worker_index: int, num_workers: int, timeout_s: float, *, insecure: bool
    ) -> None:
        first = _first_address(endpoints, num_workers)
        if all(is_local(Address.parse(endpoint).host) for endpoint in endpoints):
            first = Address(LOOPBACK, first.port)
            os.environ.setdefault(_INTERFACE, "lo")
        elif not insecure:
            raise SettingError(
                "PserverStrategy.dense: 'all_reduce' between machines has no keys, and PADDLE_TRAINER_ENDPOINTS names "
                "other machines than this one. Write dense='pservers', or set FLEET_SPARSE_INSECURE=1 in a trusted "
                "network"
            )
        os.environ.setdefault("PADDLE_TRAINER_ID", str(worker_index))  # Paddle reads it there
        place = paddle.framework._current_expected_place()
        self._gpu = place if isinstance(place, core.CUDAPlace) else None
        self._first, self._index, self._num_workers, self._timeout_s = first, worker_index, num_workers, timeout_s
        self._store: Any = None
        self._group: Any = None
        self._error: Exception | None = None
        # Paddle's store can wait for ever, in a call that nothing interrupts, if a worker dies while they connect.
        connecting = threading.Thread(target=self._connect, name="fleet_sparse-all-reduce", daemon=True)
        connecting.start()
        connecting.join(timeout_s)
        if self._group is None:
            reason = "no answer" if self._error is None else _last_line(self._error)
            raise FleetSparseError(
                f"all-reduce: worker {worker_index} was not connected with the others at {first} within "
                f"{timeout_s:g} s ({reason}). Look at the other workers' logs; worker 0 needs that port for itself. "
                "Restart this process: it may hold the port until it ends"
            ) from self._error

    def _connect(self) -> None:
        index, num_workers, first = self._index, self._num_workers, self._first
        try:
            if index == 0:
                _check_free(first.port)
            else:
                _await_listener(first, self._timeout_s)
            self._store = core.TCPStore(first.host, first.port, index == 0, num_workers, max(1, int(self._timeout_s)))
            if self._gpu is None:
                self._group = core.ProcessGroupGloo.create(self._store, index, num_workers, _GROUP_ID)
            else:
                self._group = core.ProcessGroupNCCL.create(self._store, index, num_workers, _GROUP_ID)
        except _FAILURES as error:
            self._error = error

    def share(self, num_values: int) -> PaddleArray:
        """As `WorkerGroup`."""
        return PaddleArray(self._group, num_values, self._gpu)

    def close(self) -> None:
        """As `WorkerGroup`."""
        self._group = self._store = None


class PaddleArray:
    """Implements `SharedArray`: in the memory of a tensor on the CPU, or copied to one on the GPU and back."""

    def __init__(self, group: Any, num_values: int, gpu: Any) -> None:
        self._group = group
        self._gpu = gpu
        before = paddle.base.framework._dygraph_tracer()  # None in static graph mode
        core._switch_tracer(core.Tracer())
        try:
            place = core.CPUPlace() if gpu is None else gpu
            self._tensor = core.eager.Tensor(value=np.zeros(num_values, np.float32), place=place)
        finally:
            core._switch_tracer(before)
        self._values = np.zeros(num_values, np.float32)
        if gpu is None:
            self._values = np.asarray(np.from_dlpack(self._tensor), np.float32)  # no copy

    @property
    def values(self) -> NDArray[np.float32]:
        """As `SharedArray`."""
        return self._values

    def sum(self) -> None:
        """As `SharedArray`."""
        self._run(lambda: self._group.all_reduce(self._tensor, core.ReduceOp.SUM, True))

    def broadcast(self, source: int) -> None:
        """As `SharedArray`."""
        self._run(lambda: self._group.broadcast(self._tensor, source, True))

    def _run(self, begin: Any) -> None:
        try:
            if self._gpu is not None:
                self._tensor.get_tensor().set(self._values, self._gpu)
            begin().wait()
            if self._gpu is not None:
                self._values[:] = np.asarray(self._tensor.get_tensor())
        except _FAILURES as error:
            raise FleetSparseError(
                f"all-reduce: another worker ended or did not answer ({_last_line(error)}). Look at the other "
                "workers' logs, and start the job again from the last save"
            ) from error


def _first_address(endpoints: Sequence[str], num_workers: int) -> Address:
    """Address at which worker 0 listens."""
    if len(endpoints) == num_workers:
        first = Address.parse(endpoints[0])
        if first.port:
            return first
    raise SettingError(
        f"PADDLE_TRAINER_ENDPOINTS: is {','.join(endpoints)!r}, should be host:port of each of {num_workers} workers, "
        "because PserverStrategy(dense='all_reduce') connects them with each other. fleetrun sets it"
    )


def _check_free(port: int) -> None:
    """Raises OSError if another socket listens on the port: Paddle's store would abort the process."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", port))


def _await_listener(address: Address, timeout_s: float) -> None:
    """Returns when somebody listens at the address: Paddle's store tries every 3 s only, and without end."""
    until = time.monotonic() + timeout_s
    while True:
        with suppress(OSError), socket.create_connection(address, timeout=timeout_s):
            return
        if time.monotonic() > until:
            raise TimeoutError(f"no process listens at {address}")
        time.sleep(_POLL_S)


def _last_line(error: Exception) -> str:
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
