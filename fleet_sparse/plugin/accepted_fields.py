"""Fields of Paddle's `DistributedStrategy` that are accepted although they change nothing here, and the reasons.

A reason completes a sentence: "DistributedStrategy.adam_d2sum is True and changes nothing: ...".
"""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message

from .accessor_config import obeyed_fields

_QUEUES = "a step is sent as one push; FLEET_SPARSE_MAX_INFLIGHT_PUSHES and _BYTES bound the pushes that are under way"
_NO_THREADS = "the thread that runs the program sends and receives by itself"

REASONS = {
    "adam_d2sum": "the optimizer of the script trains dense parameters, as in plain Paddle",
    "a_sync_configs.max_merge_var_num": "gradients of several steps are not merged into one push",
    "a_sync_configs.send_queue_size": _QUEUES,
    "a_sync_configs.send_wait_times": _QUEUES,
    "a_sync_configs.min_send_grad_num_before_recv": "the next step reads the newest values on the pservers",
    "a_sync_configs.independent_recv_thread": _NO_THREADS,
    "a_sync_configs.thread_pool_size": _NO_THREADS,
    "a_sync_configs.runtime_split_send_recv": "every array is divided over the pservers",
    "a_sync_configs.launch_barrier": "init_worker waits for the pservers, and for all workers where steps wait",
    "a_sync_configs.lr_decay_steps": "every push has its learning rate, so that a scheduler works step by step",
    "fs_client_param": "every pserver writes its own part of a save under FLEET_SPARSE_ROOT, a directory or URL",
    "trainer_desc_configs.trainer": "a program is run by exe.run",
    "trainer_desc_configs.device_worker": "a program is run by exe.run",
    "trainer_desc_configs.stat_var_names": "one thread trains, so there are no statistics of several threads to merge",
    "trainer_desc_configs.remote_sparse": "all embeddings with sparse=True are tables on the pservers",
}
"""Reasons by dotted path of the field; a path stands for the fields below it, too."""

OF_TABLES = (
    "a row has all its values from the first push on, has one update rule (that of embedx_sgd_param if both are given) "
    "and lies in memory; deltas have all rows that changed"
)
_OTHER_TABLES = ("SSDSparseTable", "GraphTable")
_NOT_TRAINING = ("shard_num", "type", "table_id", "table_name", "table_class")


def reason_for(path: str) -> str | None:
    """Why the field at the dotted `path` changes nothing; None if it is not one of these."""
    return REASONS.get(path) or REASONS.get(path.partition(".")[0])


def settings_of_tables(tables: Any) -> list[str]:
    """The settings of `sparse_table_configs` that are set and not obeyed; `OF_TABLES` is why they change nothing.

    Args:
        tables: The repeated field `downpour_table_param`.
    """
    settings = []
    for table in tables:
        obeyed = {f"accessor.{name}" for name in obeyed_fields(table.accessor)}
        names = [name for name in _names(table) if name not in _NOT_TRAINING and name not in obeyed]
        what = f"sparse_table_configs[{table.table_name!r}]"
        if names:
            settings.append(f"{what} ({', '.join(names)})")
    return settings


def refused_table(tables: Any) -> tuple[str, str] | None:
    """Name and class of the first table whose class is not supported; None without one."""
    return next(((each.table_name, each.table_class) for each in tables if each.table_class in _OTHER_TABLES), None)


def _names(message: Message, path: str = "") -> list[str]:
    """The dotted paths of the fields that are set."""
    names = []
    for field, value in message.ListFields():
        names += _names(value, f"{path}{field.name}.") if isinstance(value, Message) else [path + field.name]
    return names
