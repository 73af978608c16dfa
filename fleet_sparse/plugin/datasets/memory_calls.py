"""The methods of Paddle's data sets that read, shuffle and count lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any
from weakref import WeakKeyDictionary

from paddle.base import dataset as paddle_1
from paddle.distributed import InMemoryDataset, QueueDataset
from paddle.distributed import fleet as fleet_module

from fleet_sparse.errors import PlanError
from fleet_sparse.warm_up import warm_up

from ..active_session import active
from .memory import Memory
from .source import read_source

IN_MEMORY = (InMemoryDataset, paddle_1.InMemoryDataset)
"""Paddle's classes of data sets that are loaded; `DatasetFactory` makes the second one."""
QUEUES = (QueueDataset, paddle_1.QueueDataset)
"""Paddle's classes of data sets that are read while a program runs."""

_memories: WeakKeyDictionary[Any, Memory] = WeakKeyDictionary()


def memory_of(dataset: Any) -> Memory:
    """Returns the lines of a data set."""
    return _memories.setdefault(dataset, Memory())


def replaced_methods() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Returns the methods of Paddle's classes that are replaced: class, name and function."""
    kind = paddle_1.DatasetBase
    replaced = [(kind, "set_use_var", _with_shapes(kind.set_use_var))]
    return replaced + [
        (kind, function.__name__, function)
        for kind in IN_MEMORY
        for function in (
            load_into_memory,
            preload_into_memory,
            wait_preload_done,
            local_shuffle,
            global_shuffle,
            release_memory,
            get_memory_data_size,
            get_shuffle_data_size,
            slots_shuffle,
        )
    ]


def _with_shapes(stock: Callable[..., None]) -> Callable[..., None]:
    """Wraps `DatasetBase.set_use_var` of `DatasetFactory`, which leaves the shapes out in Paddle's new IR."""

    @wraps(stock)
    def set_use_var(self: Any, var_list: Sequence[Any]) -> None:
        slots = self.proto_desc.multi_slot_desc.slots
        num_known = len(slots)
        stock(self, var_list)
        for slot, value in zip(slots[num_known:], var_list, strict=True):
            if not slot.shape:
                slot.is_dense = True
                slot.shape.extend(value.shape)

    return set_use_var


def load_into_memory(self: Any, is_shuffle: bool = False) -> None:
    """Reads all files of the list into memory, in `thread_num` threads; the lines are in the order of the files.

    Raises:
        DatasetError: A file or its `pipe_command` is wrong; nothing is loaded then.
        PlanError: It is loaded already, or a setting is not supported.
    """
    preload_into_memory(self)
    wait_preload_done(self)
    if is_shuffle:
        local_shuffle(self)


def preload_into_memory(self: Any, thread_num: int | None = None) -> None:
    """Begins to read all files of the list into memory, and returns."""
    warm_up()  # a script may load data before fleet.init_worker()
    source = read_source(self, active().settings.pipe_s)
    memory_of(self).preload(source, source.num_threads if thread_num is None else thread_num)


def wait_preload_done(self: Any) -> None:
    """Waits until all files are read.

    Raises:
        DatasetError: A file or its `pipe_command` is wrong; nothing is loaded then.
    """
    memory_of(self).wait()


def local_shuffle(self: Any) -> None:
    """Shuffles the lines of this worker.

    `FLEET_SPARSE_SEED`, the number of shuffles before, and the worker's index decide the order.
    """
    memory = memory_of(self)
    memory.held("local_shuffle")
    memory.shuffle(active().settings.seed, worker_index())


def global_shuffle(self: Any, fleet: Any = None, thread_num: int = 12) -> None:
    """Sends each line to a random worker and shuffles what each has then; without `fleet` as `local_shuffle`.

    All workers call it. `FLEET_SPARSE_SEED`, the number of shuffles before, and the sender's index decide where each
    line goes.

    Raises:
        FleetSparseError: Before `fleet.init_worker()`, in a job of several workers.
        WorkerLost: A worker is lost.
    """
    memory, num_workers = memory_of(self), _num_workers(fleet)
    memory.held("global_shuffle")
    if num_workers == 1:
        memory.shuffle(active().settings.seed, worker_index())
        return
    connection = active().connection("global_shuffle")
    connection.leave_steps()
    exchange = partial(connection.exchange, "global_shuffle")
    memory.shuffle_globally(active().settings.seed, worker_index(), num_workers, exchange)


def release_memory(self: Any) -> None:
    """Drops the lines."""
    memory_of(self).release()


def get_memory_data_size(self: Any, fleet: Any = None) -> int:
    """Number of lines of this worker; with `fleet`, of all workers, which all call it."""
    lines, num_workers = memory_of(self).lines, _num_workers(fleet)
    num_lines = 0 if lines is None else lines.num_lines
    if num_workers == 1:
        return num_lines
    connection = active().connection("get_memory_data_size")
    connection.leave_steps()
    sizes = connection.exchange("get_memory_data_size", [num_lines.to_bytes(8, "little")] * num_workers)
    return sum(int.from_bytes(size, "little") for size in sizes)


def get_shuffle_data_size(self: Any, fleet: Any = None) -> int:
    """Number of lines of this worker after shuffling; with `fleet`, of all workers, which all call it."""
    return get_memory_data_size(self, fleet)


def slots_shuffle(self: Any, slots: Any) -> None:
    """Refused.

    Raises:
        PlanError: Always.
    """
    raise PlanError("InMemoryDataset.slots_shuffle: is not supported. Shuffle the values of a slot in pipe_command")


def _num_workers(fleet: Any) -> int:
    return 1 if fleet is None else int(fleet.worker_num())


def worker_index() -> int:
    """Index of this worker; 0 before `fleet.init()`."""
    return 0 if fleet_module.fleet._role_maker is None else int(fleet_module.worker_index())
