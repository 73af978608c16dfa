"""The methods of Paddle's data sets that read, shuffle and count lines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import paddle
from paddle.base import dataset as of_factory
from paddle.distributed import InMemoryDataset, QueueDataset
from paddle.distributed import fleet as fleet_module

from fleet_sparse.errors import PlanError
from fleet_sparse.warm_up import warm_up

from ..active_session import active
from ..resumable import Resumable
from .memory import Memory
from .source import read_source

IN_MEMORY = (InMemoryDataset, of_factory.InMemoryDataset)
"""Paddle's classes of data sets in memory: `paddle.distributed`'s, and those that its `DatasetFactory` makes."""
QUEUES = (QueueDataset, of_factory.QueueDataset)
"""Paddle's classes of data sets that are read while a program runs."""

_memories: WeakKeyDictionary[Any, Memory] = WeakKeyDictionary()


def memory_of(dataset: Any) -> Memory:
    """Returns the lines of a data set."""
    return _memories.setdefault(dataset, Memory())


def replaced_methods() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Returns the methods of Paddle's classes that are replaced: class, name and function."""
    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
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
    return [
        *replaced,
        (InMemoryDataset, "tdm_sample", tdm_sample),
        (of_factory.DatasetBase, "set_use_var", set_use_var),
    ]


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

    `FLEET_SPARSE_SEED`, the number of shuffles before, and the worker's index decide the order; of a data set that is
    `fleet_sparse.resumable` its epoch in place of the shuffles before.

    Raises:
        FleetSparseError: Before `fleet.init_worker()`, of a resumable data set.
    """
    memory = memory_of(self)
    memory.held("local_shuffle")
    memory.shuffle(active().settings.seed, worker_index(), _epoch_of(self))


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
        memory.shuffle(active().settings.seed, worker_index(), _epoch_of(self))
        return
    connection = active().connection("global_shuffle")
    connection.leave_steps_together()
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
    connection.leave_steps_together()
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


def tdm_sample(self: Any, *args: Any, **kwargs: Any) -> None:
    """Refused.

    Raises:
        PlanError: Always.
    """
    raise PlanError("InMemoryDataset.tdm_sample: is not supported. Sample the items of a tree in pipe_command")


def set_use_var(self: Any, var_list: Any) -> None:
    """Names the inputs, in the order of the text. Paddle's leaves their shapes out in its new IR.

    Raises:
        PlanError: An input is neither int64 nor float32.
    """
    for var in var_list:
        kind = {paddle.int64: "uint64", paddle.float32: "float"}.get(var.dtype)
        if kind is None:
            raise PlanError(f"set_use_var: input {var.name!r} is {var.dtype}, should be int64 or float32")
        slot = self.proto_desc.multi_slot_desc.slots.add()
        slot.name, slot.type, slot.is_used, slot.is_dense = var.name, kind, True, True
        slot.shape.extend(var.shape)


def _epoch_of(dataset: Any) -> int | None:
    """The epoch that begins, of a resumable data set; else None."""
    loader = active().loader
    return loader.epoch if isinstance(loader, Resumable) and loader.loader is dataset else None


def _num_workers(fleet: Any) -> int:
    return 1 if fleet is None else int(fleet.worker_num())


def worker_index() -> int:
    """Index of this worker; 0 before `fleet.init()`."""
    return 0 if fleet_module.fleet._role_maker is None else int(fleet_module.worker_index())
