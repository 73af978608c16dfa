"""The wording of every entry of docs/errors.md: each message once, raised by the code that users run."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import paddle
import pytest
from paddle.base.dygraph.base import to_static_mode_guard
from paddle.distributed import fleet

import fleet_sparse
from fleet_sparse import machine_memory
from fleet_sparse.control_socket import socket_path
from fleet_sparse.core.dense_spec import Segment
from fleet_sparse.core.mode import ASYNC, SYNC, Mode
from fleet_sparse.core.row_bound import NO_VERSION, RowBound
from fleet_sparse.core.version import Version
from fleet_sparse.credentials import Credentials
from fleet_sparse.errors import (
    DatasetError,
    ErrorCode,
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
from fleet_sparse.launch import Launch
from fleet_sparse.net_addresses import Address
from fleet_sparse.plugin.active_session import active
from fleet_sparse.plugin.all_reduce import PaddleGroup
from fleet_sparse.plugin.collectives import all_gather
from fleet_sparse.plugin.datasets.dump import dump_of
from fleet_sparse.plugin.datasets.feeds import FeedMaker
from fleet_sparse.plugin.datasets.lines import Lines
from fleet_sparse.plugin.datasets.readers import Reader
from fleet_sparse.plugin.datasets.slots import Slot
from fleet_sparse.plugin.datasets.source import Source
from fleet_sparse.plugin.datasets.text import Pipe, Processes, text_of
from fleet_sparse.plugin.dygraph.layers import check_untraced
from fleet_sparse.plugin.optimizer import PserverOptimizer
from fleet_sparse.plugin.optimizer_config import read_optimizer
from fleet_sparse.plugin.paddle_support import check_flags, check_version
from fleet_sparse.plugin.row_cache import RowCache, check_memory
from fleet_sparse.plugin.schedule import Schedule
from fleet_sparse.plugin.size_limit import SizeLimit
from fleet_sparse.plugin.snapshots import Snapshots
from fleet_sparse.plugin.static.minimize import minimize
from fleet_sparse.plugin.static.sequence_pool import wrap_sequence_pool
from fleet_sparse.plugin.strategy import PserverStrategy, read_strategy
from fleet_sparse.pserver.admin.barriers import Arrival
from fleet_sparse.pserver.admin.grpc_server import ControlPlane
from fleet_sparse.pserver.admin.log_recovery import write_checkpoint
from fleet_sparse.pserver.admin.membership import Membership, Registrant
from fleet_sparse.pserver.admin.root import resolve_under
from fleet_sparse.pserver.admin.service import Supervised
from fleet_sparse.pserver.admin.snapshot_loader import load
from fleet_sparse.pserver.endpoints import DataEndpoints, check_free, choose
from fleet_sparse.pserver.lease.directory import DirectoryCoordinator
from fleet_sparse.pserver.lease.lease import take_lease
from fleet_sparse.pserver.log.log_format import Kind
from fleet_sparse.pserver.log.segment_ahead import SegmentAhead
from fleet_sparse.pserver.net.requests import Traffic
from fleet_sparse.pserver.read_only import content as read_only_content
from fleet_sparse.pserver.read_only.service import ReadOnlyService
from fleet_sparse.pserver.read_only.shard import ReadOnlyShard, check_same
from fleet_sparse.pserver.refusal import Refusal
from fleet_sparse.pserver.server import Options, lease_of
from fleet_sparse.serving.exported_rows import RowChoice, check_choice, stored_rows
from fleet_sparse.serving.labelled import read_labelled, target_of
from fleet_sparse.serving.model import ServedModel, Table, Tensor, read_model
from fleet_sparse.serving.paddle_export import check_tables
from fleet_sparse.serving.predictor import check_rows
from fleet_sparse.serving.pserver_reader import PserverReader
from fleet_sparse.serving.versions import Versions
from fleet_sparse.settings import Settings
from fleet_sparse.snapshot.directory import directory_at
from fleet_sparse.snapshot.reader import open_content
from fleet_sparse.snapshot.serve_file import ServeFile, write_serve_file
from fleet_sparse.snapshot.store import open_chain, served_chain
from fleet_sparse.transpiler.inference import forward_part
from fleet_sparse.wire import control_pb2 as messages
from fleet_sparse.wire.decode import decode
from fleet_sparse.wire.encode import encode
from fleet_sparse.wire.frame_format import Frame, Header, Op
from fleet_sparse.worker.control import save as control_save
from fleet_sparse.worker.control.control import ControlClient
from fleet_sparse.worker.control.failover import Failover
from fleet_sparse.worker.modes.step import Progress
from fleet_sparse.worker.net.client import Client
from fleet_sparse.worker.net.link_errors import LinkErrors
from fleet_sparse.worker.net.request import Request
from fleet_sparse.worker.net.shard_link import ClientIdentity, Registration, Resumption, ShardLink
from fleet_sparse.worker.rows.row_batch import RowBatch
from fleet_sparse.worker.rows.row_exchange import RowAsk, RowChange, answer_of
from support import fake_pservers, saves
from support.client_calls import pulled, pulled_for, unique_of, update, workers_of
from support.controls import HeldControl, barrier, registration
from support.coordinators import Coordinator, run
from support.in_process import QUICK, InProcessCluster
from support.job_keys import make_keys
from support.logs import close, logged_shard, small_writer
from support.paddle_plugin import plugin
from support.shards import ADAM, DENSE, SGD, FrameClient, floats, ids_of, make_shard, push
from support.sources import ROOT
from support.steps import SYNC_MODE
from support.waits import wait_until

__all__ = ["plugin"]

Provoke = Callable[[Path], object]
IDS = [1, 2, 3]
NO_VERSIONS = np.full(len(IDS), NO_VERSION)
"""Versions of copies of these ids, which there are not."""


class Entry(NamedTuple):
    """An entry of the page.

    Attributes:
        message: All of it; `<dir>` is the directory of the test, and `<...>` differs from run to run.
        provoke: Raises it.
    """

    error: type[FleetSparseError]
    message: str
    provoke: Provoke


ENTRIES: list[Entry] = []


def entry(error: type[FleetSparseError], message: str) -> Callable[[Provoke], Provoke]:
    """Adds an entry of the page; the function raises its error."""

    def add(provoke: Provoke) -> Provoke:
        ENTRIES.append(Entry(error, message, provoke))
        return provoke

    return add


# The Paddle of this machine


@entry(
    InstallError,
    "paddle 3.2.0: is not supported, should be at least 3.3.1 and below 3.4. pip install 'paddlepaddle>=3.3.1,<3.4'",
)
def _old_paddle(_: Path) -> None:
    check_version("3.2.0")


@contextmanager
def flags(**values: bool) -> Iterator[None]:
    before = paddle.get_flags(list(values))
    paddle.set_flags(values)
    try:
        yield
    finally:
        paddle.set_flags(before)


@entry(
    InstallError, "FLAGS_use_mkldnn: is on, should be off: Paddle then computes wrong gradients of rows. Turn it off"
)
def _onednn(_: Path) -> None:
    with flags(FLAGS_use_mkldnn=True):
        check_flags()


@entry(
    InstallError,
    "FLAGS_enable_pir_api: is 0, and programs of the old IR are not supported. Leave it out, or, if the script sets it "
    "before it imports paddle, call fleet_sparse.install() above this line",
)
def _old_ir(_: Path) -> None:
    with flags(FLAGS_enable_pir_api=False):
        check_flags()


# Programs, strategies and calls


@entry(PlanError, "table 'emb': dtype is float64, should be float32")
def _lookup(_: Path) -> None:
    ids = paddle.static.data("ids", [-1], "int64")
    attr = paddle.ParamAttr(name="emb")
    paddle.static.nn.embedding(ids, size=[10, 4], is_sparse=True, param_attr=attr, dtype="float64")


@entry(PlanError, "DistributedStrategy.amp: is True and is not supported with pservers. Leave it out")
def _strategy(_: Path) -> None:
    strategy = fleet.DistributedStrategy()
    strategy.amp = True
    read_strategy(strategy)


@entry(
    PlanError,
    "PserverStrategy.dense: is 'all_reduce', and Paddle has no optimizer ops of rule 'ftrl'. Write dense='pservers', "
    "or leave it out",
)
def _dense(_: Path) -> None:
    loss = paddle.mean(paddle.static.nn.fc(paddle.static.data("x", [-1, 2], "float32"), 1))
    strategy = PserverStrategy(dense="all_reduce")
    strategy.a_sync = False
    optimizer = PserverOptimizer("ftrl", 0.1)
    minimize(active(), loss, optimizer, strategy, None, None, num_pserver_processes=2, num_workers=2)


@entry(
    PlanError,
    "PserverStrategy: max_row_lag is 100 and max_row_drift is 0.1, and rows have one bound. Leave one of both out",
)
def _row_bound(_: Path) -> None:
    read_strategy(PserverStrategy(max_row_lag=100, max_row_drift=0.1))


@entry(
    PlanError,
    "PserverStrategy.row_cache: is given without a bound on what its rows may lack. Write max_row_lag=100, or "
    "max_row_drift=2 * learning_rate, too",
)
def _unbounded_row_cache(_: Path) -> None:
    read_strategy(PserverStrategy(row_cache=RowCache()))


@entry(
    PlanError,
    "PserverStrategy.max_row_lag: is 100 with k_steps above 0, whose windows cache rows already. Leave it out, or "
    "write k_steps 0",
)
def _row_bound_in_geo(_: Path) -> None:
    strategy = PserverStrategy(max_row_lag=100)
    strategy.a_sync_configs = {"k_steps": 10}
    read_strategy(strategy)


@entry(
    PlanError,
    "PserverStrategy.refuse_ids_past_size: is True, which has a meaning with max_row_lag and max_row_drift of None "
    "only. <...>",
)
def _size_limit_with_row_caches(_: Path) -> None:
    read_strategy(PserverStrategy(max_row_lag=100, refuse_ids_past_size=True))


@entry(
    PlanError,
    "RowCache.max_bytes: is 1125899906842624, the copies need 1125899906842624 bytes, and <...> bytes of memory are "
    "free. Write less",
)
def _row_cache_past_memory(_: Path) -> None:
    check_memory(RowCache(max_bytes=1 << 50), read_optimizer(paddle.optimizer.SGD(0.1)), [16])


@entry(
    PlanError,
    "save_every: seconds is 600, and the row caches of the workers of a sync job hold updates back, which they send "
    "after the same step. Write save_every(..., steps=) alone",
)
def _schedule_by_the_clock(_: Path) -> None:
    connection: Any = SimpleNamespace(training=SimpleNamespace(holds_back=True))
    snapshots: Any = SimpleNamespace()
    Snapshots.check_schedule(snapshots, connection, Schedule("model", seconds=600, steps=None, keep_last=1, deltas=0))


@entry(PlanError, "optimizer Rprop: is not supported on pservers, should be one of Adagrad, <...>")
def _optimizer(_: Path) -> None:
    read_optimizer(paddle.optimizer.Rprop(0.1))


@entry(
    PlanError,
    "save_dense_params: dense parameters are saved with the tables. Write fleet.save_persistables(exe, dirname)",
)
def _call(_: Path) -> None:
    fleet.init()
    fleet.save_dense_params(None, "model", None, None)


@entry(
    PlanError,
    "save_inference_model: a lookup in table 'emb' is inside pd_op.if, which cannot be saved. Look the rows up before "
    "the control flow and use them inside",
)
def _served(_: Path) -> None:
    ids = paddle.static.data("ids", [-1], "int64")

    def looked_up() -> Any:
        attr = paddle.ParamAttr(name="emb")
        return paddle.static.nn.embedding(ids, size=[10, 4], is_sparse=True, is_distributed=True, param_attr=attr)

    target = paddle.static.nn.cond(paddle.sum(ids) > 0, looked_up, looked_up)
    forward_part(paddle.static.default_main_program(), [target])


@entry(
    PlanError,
    "init_worker: SGD.minimize(loss) was called without fleet, so that every worker would train alone and pservers "
    "would save nothing. Write fleet.distributed_optimizer(optimizer, strategy).minimize(loss), before this line",
)
def _not_given(_: Path) -> None:
    fleet.init()
    paddle.optimizer.SGD(0.1).minimize(paddle.mean(paddle.nn.Linear(2, 1)(paddle.static.data("x", [-1, 2]))))
    fleet.init_worker()


def _of_layer(initializer: Any) -> tuple[Any, Any]:
    attr = paddle.ParamAttr(name="emb", initializer=initializer)
    layer = paddle.nn.Embedding(10, 4, sparse=True, weight_attr=attr)
    return layer, layer(paddle.static.data("ids", [-1], "int64"))


@entry(
    PlanError,
    "table 'emb': its initializer is the op 'assign_value', should be Constant, Uniform, Normal or another one of "
    "numbers alone. Give minimize the startup program with which the layer was built, give the layer another "
    "initializer, or keep it a dense parameter: PserverStrategy(dense_embeddings=['emb'])",
)
def _layer(_: Path) -> None:
    fleet.init()
    _, rows = _of_layer(paddle.nn.initializer.Assign(np.zeros((10, 4), np.float32)))
    fleet.distributed_optimizer(paddle.optimizer.SGD(0.1)).minimize(paddle.mean(rows))


@entry(
    PlanError,
    "table 'emb': pd_op.mean reads the weight of an embedding whose rows are on the pservers, or looks them up inside "
    "control flow. Look up the rows of the ids before the control flow",
)
def _weight(_: Path) -> None:
    fleet.init()
    _, rows = _of_layer(paddle.nn.initializer.Constant(0.5))
    fleet.distributed_optimizer(paddle.optimizer.SGD(0.1)).minimize(paddle.mean(rows))
    with paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()):
        layer, _ = _of_layer(None)
        value = paddle.mean(layer.weight)
        paddle.static.Executor(paddle.CPUPlace()).run(feed={"ids": np.array([1])}, fetch_list=[value])


@entry(
    PlanError,
    "table 'adam': --seen-within-days 7 needs days, and no save ended one. Save with fleet.save_persistables(exe, "
    "dirname, mode=3) at the end of a day, or leave the option out",
)
def _days(where: Path) -> None:
    saves.save(saves.trained(1), where)
    with open_content(str(where)) as content:
        check_choice(content, ["adam"], RowChoice(seen_within_days=7))


@entry(PlanError, "table 'emb': the row of id 7 has 70000, which float16 cannot store. Write --dtype float32")
def _too_large_for_float16(_: Path) -> None:
    stored_rows("emb", np.array([7]), np.full((1, 2), 7e4, np.float32), "float16")


@entry(
    PlanError,
    "paddle.static.save_inference_model: a program does not contain rows of tables, and lookups in them cannot be "
    "written to a file. Write fleet.save_inference_model(exe, dirname, feeds, targets) for a model to predict with, "
    "fleet.save_persistables(exe, dirname) for all values",
)
def _file(where: Path) -> None:
    ids = paddle.static.data("ids", [-1], "int64")
    rows = paddle.static.nn.embedding(ids, size=[10, 4], is_sparse=True)
    executor = paddle.static.Executor(paddle.CPUPlace())
    paddle.static.save_inference_model(str(where / "model"), [ids], [rows], executor)


@entry(
    PlanError,
    "DataLoader.from_generator: a loader with iterable=False is iterated over. Call loader.start() and "
    "exe.run(program, fetch_list=[...]) until it raises paddle.base.core.EOFException, or write iterable=True",
)
def _loader(_: Path) -> None:
    ids = paddle.static.data("ids", [-1], "int64")
    for _batch in paddle.io.DataLoader.from_generator(feed_list=[ids], iterable=False):
        pass


@entry(
    PlanError,
    "fleet.util.all_reduce: comm_world is 'all', should be 'worker': a pserver runs nothing of the script after "
    "fleet.run_server()",
)
def _collective(_: Path) -> None:
    fleet.init()
    fleet.util.all_reduce([1], comm_world="all")


@entry(PlanError, "entry 'count_filter': threshold is -1, should be 0, 1, 2 ...")
def _entry_policy(_: Path) -> None:
    fleet_sparse.entry("count_filter", threshold=-1)


@entry(
    PlanError,
    "fleet.util.all_gather: the value of worker 0 is a str of dtype <U1, should be a number or an array of numbers",
)
def _gathered_text(_: Path) -> None:
    all_gather(SimpleNamespace(role=SimpleNamespace(num_workers=1)), "a")


@entry(PlanError, "sequence_pool: pool_type is 'max', should be 'sum', 'average' or 'sqrt'")
def _pool_type(_: Path) -> None:
    with paddle.static.program_guard(paddle.static.Program()):
        wrap_sequence_pool(paddle.static.nn.sequence_pool)(None, "max")


@entry(PlanError, "exe.train_from_dataset: dump_fields_path is '', should be a directory of this machine")
def _dump_path(_: Path) -> None:
    dump_of("exe.train_from_dataset", {"dump_fields": ["a"]}, 0, lambda _: True)


@entry(
    PlanError,
    "continuous_value_model: cvm has shape [-1, 1], should be [examples, 2 or more]",
)
def _click_layer(_: Path) -> None:
    with paddle.static.program_guard(paddle.static.Program()):
        rows, cvm = paddle.static.data("rows", [-1, 4]), paddle.static.data("cvm", [-1, 1])
        paddle.static.nn.continuous_value_model(rows, cvm, use_cvm=True)


@entry(
    PlanError,
    "DistributedStrategy.trainer_desc_configs['dump_param']: is ['a'] and is not supported with pservers. Leave it "
    "out, and fetch the parameters: fetch_list=[...], or fetch_handler in exe.train_from_dataset",
)
def _dump(_: Path) -> None:
    strategy = fleet.DistributedStrategy()
    strategy.trainer_desc_configs = {"dump_param": ["a"]}
    read_strategy(strategy)


# Dygraph


@contextmanager
def dygraph() -> Iterator[None]:
    """A job in dygraph, in a test of a static one."""
    paddle.disable_static()
    try:
        fleet.init()
        yield
    finally:
        paddle.enable_static()


@entry(
    PlanError,
    "table 'rows': paddle.jit.to_static cannot trace a lookup on pservers. Apply it to the layers that take the rows, "
    "or build the model in static graph mode",
)
def _traced(_: Path) -> None:
    with to_static_mode_guard():  # which adds the user's source to the message of any error
        check_untraced("rows")


@entry(
    PlanError,
    "table 'emb': weight.numpy of its layer is read, but its rows are on the pservers. Look rows up by calling the "
    "layer, or keep the weight a parameter: PserverStrategy(dense_embeddings=['emb']) in fleet.init",
)
def _read_weight(_: Path) -> None:
    with dygraph():
        paddle.nn.Embedding(10, 4, sparse=True, weight_attr=paddle.ParamAttr(name="emb")).weight.numpy()


@entry(
    PlanError,
    "optimizer.step: this SGD was not given to fleet, so that tables are not trained and every worker trains alone. "
    "Write optimizer = fleet.distributed_optimizer(optimizer, strategy)",
)
def _step_outside_fleet(_: Path) -> None:
    with dygraph():
        layer = fleet.distributed_model(paddle.nn.Linear(1, 1))
        fleet.init_worker()
        paddle.optimizer.SGD(0.1, parameters=layer.parameters()).step()


@entry(
    PlanError,
    "distributed_optimizer: Adam is the second optimizer in dygraph, and one trains all tables and parameters of a "
    "job. Give all parameters to one optimizer",
)
def _second_optimizer(_: Path) -> None:
    with dygraph():
        parameters = paddle.nn.Linear(1, 1).parameters()
        for kind in (paddle.optimizer.SGD, paddle.optimizer.Adam):
            fleet.distributed_optimizer(kind(0.1, parameters=parameters))


@entry(
    PlanError,
    "distributed_optimizer: fleet.init() was not called in dygraph. Call fleet_sparse.install() and then fleet.init(), "
    "before the model is built",
)
def _optimizer_before_init(_: Path) -> None:
    paddle.disable_static()
    try:
        fleet.distributed_optimizer(paddle.optimizer.SGD(0.1, parameters=paddle.nn.Linear(1, 1).parameters()))
    finally:
        paddle.enable_static()


@entry(
    PlanError,
    "table 'emb': fleet.init() was not called in dygraph. Call fleet_sparse.install() and then fleet.init(), before "
    "the model is built",
)
def _no_init(_: Path) -> None:
    paddle.disable_static()
    try:
        fleet_sparse.nn.Embedding(10, 4, weight_attr=paddle.ParamAttr(name="emb"))(paddle.to_tensor([1]))
    finally:
        paddle.enable_static()


@entry(
    PlanError, "table 't4096': shard 0 has 4096 tables, it should have at most 4096. Let several fields share one table"
)
def _tables(_: Path) -> None:
    with closing(make_shard()) as shard:
        for number in range(4097):
            shard.add_table(replace(SGD, name=f"t{number}"))


@entry(
    PlanError,
    "dense 'dense': the range of shard 0 takes 4.0 GiB with its states, this machine has 1.0 GiB left. Use more "
    "pservers, or embeddings for what is large",
)
def _memory(_: Path) -> None:
    large = replace(DENSE, segments=(Segment("w", 0, 1 << 30, 1.0),))
    with closing(make_shard()) as shard, pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine_memory, "available_bytes", lambda: 1 << 30)
        shard.add_table(large)


@entry(
    PlanError,
    "log '<dir>/log': this machine has too little memory left for what the log has (PlanError: dense 'dense': the "
    "range of shard 0 takes 0.0 GiB <...>). The log stays as it is: free memory, and start the pserver again",
)
def _log_in_little_memory(where: Path) -> None:
    close(logged_shard(where / "log", DENSE))
    with mock.patch.object(machine_memory, "available_bytes", return_value=0):
        logged_shard(where / "log")


@entry(
    PlanError,
    "barrier 'c': worker 1 came here, worker 0 waits at 'b', and no worker is left to arrive. All workers should "
    "make the same calls in the same order",
)
def _barriers(_: Path) -> None:
    members = job(2)
    members.arrive(Arrival("b", 1, 0), bytes([0]) * 16, 0.0)
    members.arrive(Arrival("c", 1, 1), bytes([1]) * 16, 0.0)


@entry(
    PlanError,
    "Register: this pserver serves snapshot 1 and trains nothing. Give workers the addresses of pservers that were "
    "started without --read-only",
)
def _read_only(where: Path) -> None:
    saves.save(saves.trained(1), where)
    shard = ReadOnlyShard(0, 1, cluster_id=1, incarnation=2)
    read_only_content.load(shard, open_chain(directory_at(where)))
    service = ReadOnlyService(
        shard, follower=None, traffic=Traffic(), data_endpoints=DataEndpoints("", ""), stop=lambda: None
    )
    asyncio.run(service.call("Register", messages.RegisterRequest()))


# Settings


@entry(
    PlanError,
    "exe.train_from_dataset: the InMemoryDataset is not loaded. Call load_into_memory() first",
)
def _not_loaded(_: Path) -> None:
    dataset = paddle.distributed.InMemoryDataset()
    dataset.init(use_var=[paddle.static.data("ids", [-1, 1], "int64")])
    paddle.static.Executor().train_from_dataset(dataset=dataset)


@entry(SettingError, "FLEET_SPARSE_WORMS: unknown setting, should be one of FLEET_SPARSE_BARRIER_S, <...>")
def _name(_: Path) -> None:
    Settings.from_environment({"FLEET_SPARSE_WORMS": "1"})


@entry(
    SettingError, "FLEET_SPARSE_SEED: is 'ten', should be a whole number, 0 to 18446744073709551615. Leave it out for 0"
)
def _number(_: Path) -> None:
    Settings.from_environment({"FLEET_SPARSE_SEED": "ten"})


@entry(
    SettingError,
    "FLEET_SPARSE_DEADLINE_S: is 'inf', should be a number of seconds, 0.001 to 1000000. Leave it out for 30",
)
def _deadline(_: Path) -> None:
    Settings.from_environment({"FLEET_SPARSE_DEADLINE_S": "inf"})


@entry(
    SettingError,
    "control plane: cannot bind to 127.0.0.1:<...>: Address already in use. Stop the process that listens there, "
    "or give this pserver another port, in `fleetrun --servers`",
)
def _port(_: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        check_free(Address("127.0.0.1", other.getsockname()[1]))


@entry(
    SettingError,
    "control socket: <...>/fleet_sparse-<...>: its mode is 755, should be 700. Remove it, or set XDG_RUNTIME_DIR of "
    "all processes of the job to a directory of your own",
)
def _socket_directory(where: Path) -> None:
    (where / f"fleet_sparse-{os.getuid()}").mkdir()
    (where / f"fleet_sparse-{os.getuid()}").chmod(0o755)
    with mock.patch.dict(os.environ, XDG_RUNTIME_DIR=str(where)):
        socket_path(7000)


@entry(
    SettingError,
    "pserver 203.0.113.77:6000: is on another machine, so this pserver would accept connections of other "
    "machines, without keys. Make keys with `fleet-sparse keys new` and set FLEET_SPARSE_KEYS to their directory "
    "on all processes of the job; or, on a network that you trust, set FLEET_SPARSE_INSECURE=1",
)
def _insecure(_: Path) -> None:
    servers = (Address("127.0.0.1", 6000), Address("203.0.113.77", 6000))
    choose(servers[0], servers, Settings(), is_local=lambda host: host == "127.0.0.1")


def job(num_workers: int, *registered: int, **options: Any) -> Membership:
    """A job of connected workers in sync mode."""
    members = Membership(lost_after_s=30.0, unseen_after_s=60.0, **options)
    for worker in registered or range(num_workers):
        members.register(registrant(worker, num_workers), 0.0)
        members.attend(bytes([worker]) * 16)
    return members


def registrant(worker: int, num_workers: int, mode: Mode = SYNC_MODE, **more: Any) -> Registrant:
    return Registrant(worker, num_workers, bytes([more.pop("client", worker)]) * 16, mode=mode, **more)


def key_directory(where: Path, *, days: int = 365, name: str = "keys") -> Path:
    return make_keys(where / name, days=days)


@entry(
    SettingError,
    "FLEET_SPARSE_KEYS: is set, and so is FLEET_SPARSE_INSECURE, which is for jobs without keys. Unset one",
)
def _keys_and_insecure(_: Path) -> None:
    Credentials.of(Settings(keys="keys", insecure=True))


@entry(
    SettingError,
    "FLEET_SPARSE_CHANNEL: is zmq, should be auto or stream with FLEET_SPARSE_KEYS: ZeroMQ has no keys here. Leave "
    "it out",
)
def _keys_and_zmq(_: Path) -> None:
    Credentials.of(Settings(keys="keys", channel="zmq"))


@entry(
    SettingError,
    "FLEET_SPARSE_KEYS: <dir>/keys/trainer.pem cannot be read (No such file or directory). Set FLEET_SPARSE_ROLE "
    "to the role whose keys the directory has, or copy that file there",
)
def _missing_keys(where: Path) -> None:
    (key_directory(where) / "trainer.pem").unlink()
    Credentials.of(Settings(keys=str(where / "keys")))


@entry(
    SettingError,
    "FLEET_SPARSE_KEYS: <dir>/keys/trainer.pem can be read by other users (mode 0644), should have mode 0600. Run "
    "`chmod 600 <dir>/keys/trainer.pem`; if others have read a key, make new ones",
)
def _readable_keys(where: Path) -> None:
    (key_directory(where) / "trainer.pem").chmod(0o644)
    Credentials.of(Settings(keys=str(where / "keys")))


@entry(
    SettingError,
    "FLEET_SPARSE_KEYS: <dir>/keys/trainer.pem, or ca.pem next to it, has expired. Make new keys with "
    "`fleet-sparse keys new`, or a certificate with `fleet-sparse keys add`",
)
def _expired_keys(where: Path) -> None:
    Credentials.of(Settings(keys=str(key_directory(where, days=-1))))


@entry(
    SettingError,
    "FLEET_SPARSE_KEYS: <dir>/keys/trainer.pem was signed by authority <...>, ca.pem next to it is authority "
    "<...>. Copy the directory of one `fleet-sparse keys new` to every host",
)
def _mixed_keys(where: Path) -> None:
    ours, theirs = key_directory(where), key_directory(where, name="theirs")
    (ours / "ca.pem").write_bytes((theirs / "ca.pem").read_bytes())
    Credentials.of(Settings(keys=str(ours)))


@entry(
    SettingError,
    "pserver 127.0.0.1:<...>: its keys are of authority <...>, those of this process are of <...>. Give all "
    "processes of the job the keys of one `fleet-sparse keys new`, and the same FLEET_SPARSE_CHANNEL",
)
def _keys_of_another_job(where: Path) -> None:
    theirs = Credentials.of(Settings(keys=str(key_directory(where, name="theirs"))), is_pserver=True)
    held = HeldControl(where)
    settings = Settings(keys=str(key_directory(where)))
    with (
        closing(ControlPlane("127.0.0.1:0", held.service, held.settings, theirs)) as served,
        ControlClient([f"127.0.0.1:{served.port}"], settings) as control,
    ):
        control.stats()


@entry(
    SettingError,
    "worker 1: its job has 3 workers, that of worker 0 has 2; all workers of a job should have the same number",
)
def _num_workers(_: Path) -> None:
    job(2, 0).register(registrant(1, 3), 0.0)


@entry(
    SettingError,
    "worker 1: its mode is async, that of worker 0 is sync (avg); all workers of a job should have the same "
    "DistributedStrategy and settings",
)
def _mode(_: Path) -> None:
    job(2, 0).register(registrant(1, 2, Mode(ASYNC)), 0.0)


@entry(
    SettingError,
    "worker 1: its mode is sync (avg), that of worker 0 is sync (avg, FLEET_SPARSE_DENSE_GRADS_DTYPE bfloat16); all "
    "workers of a job should have the same DistributedStrategy and settings",
)
def _dense_grads_dtype(_: Path) -> None:
    members = Membership(lost_after_s=30.0, unseen_after_s=60.0)
    members.register(registrant(0, 2, Mode(SYNC, dense_grads_dtype="bfloat16")), 0.0)
    members.register(registrant(1, 2), 0.0)


@entry(
    SettingError,
    "worker 1: its mode is async (max_row_drift 0.02), that of worker 0 is async (max_row_drift 0.05); all workers of "
    "a job should have the same DistributedStrategy and settings",
)
def _row_bound(_: Path) -> None:
    members = Membership(lost_after_s=30.0, unseen_after_s=60.0)
    for worker, drift in enumerate((0.05, 0.02)):
        members.register(registrant(worker, 2, Mode(ASYNC, row_bound=RowBound(drift=drift))), 0.0)


@entry(
    SettingError,
    "PADDLE_TRAINER_ENDPOINTS: is '127.0.0.1:0,127.0.0.1:0', should be host:port of each of 2 workers, because "
    "PserverStrategy(dense='all_reduce') connects them with each other. fleetrun sets it",
)
def _worker_endpoints(_: Path) -> None:
    PaddleGroup(["127.0.0.1:0", "127.0.0.1:0"], 0, 2, 1.0, insecure=False)


@entry(
    SettingError,
    "PserverStrategy.dense: 'all_reduce' between machines has no keys, and PADDLE_TRAINER_ENDPOINTS names other "
    "machines than this one. Write dense='pservers', or set FLEET_SPARSE_INSECURE=1 in a trusted network",
)
def _other_machines(_: Path) -> None:
    PaddleGroup(["127.0.0.1:6000", "203.0.113.77:6000"], 0, 2, 1.0, insecure=False)


@entry(
    SettingError,
    "worker 0: another fleetrun on this machine started it, this pserver belongs to another job. Give each job "
    "ports of its own; if both are one job, set FLEET_SPARSE_JOB_ID to the same value on all its processes",
)
def _launch(_: Path) -> None:
    members = Membership(lost_after_s=30.0, unseen_after_s=60.0, launch=Launch("", "host", "run-a"))
    members.register(registrant(0, 1, launch=Launch("", "host", "run-b")), 0.0)


@entry(
    SettingError,
    "worker 0: another process is worker 0 here and is connected. If it belongs to another job, give this job "
    "ports of its own",
)
def _place(_: Path) -> None:
    job(1).register(registrant(0, 1, client=9), 0.0)


@entry(SettingError, "barrier 'b': worker 0 is not registered, or has finished")
def _stranger_at_a_barrier(_: Path) -> None:
    job(2).arrive(Arrival("b", 1, 0), b"somebody else...", 0.0)


@entry(SettingError, "<dir>/labelled.npz: has no array 'label' with the labels; it has ids. Name it with --label")
def _labels(where: Path) -> None:
    np.savez(where / "labelled.npz", ids=np.ones(2))
    read_labelled(where / "labelled.npz", "label")


@entry(SettingError, "--target: is not given, should be one of 'prob', 'logit'")
def _target(_: Path) -> None:
    targets = tuple(Tensor(name, "float32", (-1, 1)) for name in ("prob", "logit"))
    target_of(ServedModel(1, "", "", "", "000001", (), (), targets, (), (), (), True, ()), None)


def lease(root: Path, **settings: Any) -> None:
    address = Address("127.0.0.1", 0)
    where = Settings(root=str(root), durability="log", job_id="a job", **settings)
    lease_of(Options(0, 1, address, (address,)), where)


@entry(
    SettingError,
    "FLEET_SPARSE_LOG: is 'log', where the system refuses the log: <...>. Make room there, let the pserver write "
    "there, or set it to another directory",
)
def _no_directory_for_the_log(where: Path) -> None:
    (where / "log").touch()
    lease(where)


@entry(
    SettingError,
    "shard 1 at host-b:2: its log begins with job 00000000000000ff, that of shard 0 with 0000000000000001: one of them "
    "has rows of a job that the other does not have. Start the job with another FLEET_SPARSE_JOB_ID; the logs are then "
    "set aside",
)
def _other_log(_: Path) -> None:
    pservers = fake_pservers.FakePservers()
    pservers.answer = lambda shard, *_: fake_pservers.registered(shard, log_job_id=255 if shard else 1)
    with ControlClient(pservers, fake_pservers.QUICK) as control:
        control.register([], 0, 1)


@entry(
    SettingError,
    "FLEET_SPARSE_COORDINATOR: 'etcd://127.0.0.1:1/job' cannot be reached: <...>. Start it, or correct the variable",
)
def _no_coordinator(where: Path) -> None:
    lease(where, coordinator="etcd://127.0.0.1:1/job")


# Tables


@entry(
    TableMismatch,
    "table 'sgd': worker 0 and worker 1 describe it differently: dim 2 and 8. Make them the same; of a snapshot, "
    "compatible tables can be loaded alone, by fleet.load_one_table",
)
def _two_workers(_: Path) -> None:
    with closing(make_shard(SGD)) as shard:
        shard.add_table(replace(SGD, dim=8), declared_by="worker 1")


@entry(
    TableMismatch,
    "table 'adam': the snapshot <dir> and worker 0 describe it differently: rule adam and sgd. Make them the "
    "same; of a snapshot, compatible tables can be loaded alone, by fleet.load_one_table",
)
def _snapshot_and_worker(where: Path) -> None:
    saves.save(saves.trained(1), where)
    with closing(make_shard()) as shard:
        load(shard, directory_at(where))
        shard.add_table(replace(saves.ADAM, rule="sgd", hyperparameters=()), declared_by="worker 0")


@entry(
    TableMismatch,
    "table 'adam': the model and <dir> describe it differently: dim 3 and 17. Give snapshots of the job that saved the "
    "model",
)
def _model_and_snapshot(where: Path) -> None:
    saves.save(saves.trained(1), where)
    model = SimpleNamespace(tables=[Table.of(replace(saves.ADAM, dim=3))], dense=[])
    with open_content(str(where)) as content:
        check_tables(model, content)


@entry(
    TableMismatch,
    "table 'adam': the model and the rows describe it differently: dim 3 and 17. Give the pservers of the model",
)
def _model_and_pservers(_: Path) -> None:
    model = SimpleNamespace(tables=[Table.of(replace(saves.ADAM, dim=3))], dense=[])
    check_rows(model, {"adam": saves.ADAM}, {})


# Pservers and workers that are gone


@contextmanager
def cluster_of(num_shards: int) -> Iterator[InProcessCluster]:
    cluster = InProcessCluster(num_shards)
    with closing(cluster):
        yield cluster


@entry(
    ShardUnavailable,
    "shard 1 at pserver:1: no answer to a PULL in <...> s, sent <...> times; in this process. See the log of "
    "pserver 1; if it died, start again from the last save",
)
def _silent(_: Path) -> None:
    with cluster_of(2) as cluster:
        client = cluster.client(replace(QUICK, deadline_s=1.0, retry_s=0.4))
        cluster.channel.loses_request = lambda shard: shard == 1
        pulled(cluster, client, cluster.table, range(50))


@entry(
    ShardUnavailable,
    "shard 0 at pserver:0: the pserver was started again (incarnation 0000000000000005 answered; this worker "
    "registered with 00000000000003e8); the rows that it held are gone. Load the last snapshot and start the "
    "workers again",
)
def _restarted(_: Path) -> None:
    with cluster_of(1) as cluster:
        client = cluster.client()
        cluster.shards[0].incarnation = 5
        pulled(cluster, client, cluster.table, range(5))


def _acked_link(**changes: Any) -> ShardLink:
    """Returns a link with an acked push and two that wait for their ack, of 96 bytes each."""
    registration = Registration(1, 1, 2, 5, 1, "10.0.0.2:5000", is_supervised=True, acks_precede_durability=True)
    link = ShardLink(registration, ClientIdentity(bytes(16)), Settings(**changes))
    for number in (1, 2, 3):
        request = Request(Op.PUSH)
        request.add(push(SGD, np.arange(6), np.ones((6, 2), np.float32)))
        link.submit(request, 0.0, 0.0)
        if number == 1:
            link.receive(Frame(Header(Op.ACK, incarnation=5, request_id=request.request_id, push_seq=1), []), 0.0)
    return link


@entry(
    ShardUnavailable,
    "shard 1 at 10.0.0.2:5000: no capacity for a push in 30.0 s, 2 pushes wait for their ack. See the log of pserver 1",
)
def _full_window(_: Path) -> None:
    link = _acked_link(max_inflight_pushes=2)
    assert not link.has_capacity(1, 96)
    raise link.no_capacity(30.0)


@entry(
    ShardUnavailable,
    "shard 0 at pserver:0: the pserver was started again, and its log ends with push 4 of this worker, which has 9: "
    "its machine lost steps of the job. Start the job again from its last snapshot. With FLEET_SPARSE_DURABILITY=sync "
    "no step is lost",
)
def _lost_steps(_: Path) -> None:
    registration = Registration(1, 0, 1, 5, 1, "pserver:0", is_restart=True, has_log=True, restored_seq=4)
    control = SimpleNamespace(can_fail_over=True, is_sync=True, rejoin=lambda *_: registration)
    client = mock.Mock()
    client.expect.return_value = Resumption(push_seq=9)
    Failover(control, client, set).observe(0, 5)
    raise client.fail.call_args.args[1]


@entry(
    ShardUnavailable,
    "shard 0 at pserver:0: the pserver was started again, by another supervisor and without the log of the job: the "
    "rows that it held are gone. Start the job again from its last snapshot",
)
def _without_rows(_: Path) -> None:
    control = SimpleNamespace(
        can_fail_over=True, is_sync=False, rejoin=lambda *_: Registration(1, 0, 1, 5, 1, "pserver:0")
    )
    client = mock.Mock()
    client.expect.return_value = Resumption(push_seq=9)
    Failover(control, client, set).observe(0, 5)
    raise client.fail.call_args.args[1]


@entry(
    ShardUnavailable,
    "shard 0 at host-a:1: an older process of the pserver answered (incarnation 0000000000000064, before "
    "0000000500000000). End it",
)
def _older_process(_: Path) -> None:
    pservers = fake_pservers.FakePservers()
    incarnation = 5 << 32
    pservers.answer = lambda shard, *_: fake_pservers.registered(shard, incarnation=incarnation)
    with ControlClient(pservers, fake_pservers.QUICK) as control:
        control.register([], 0, 1)
        incarnation = 100
        control.rejoin(0, Resumption())


@entry(
    ShardUnavailable,
    "shard 1 at 10.0.0.2:5000: no capacity for a push in 300.0 s, 96 bytes of acked pushes are not on the disk of the "
    "pserver yet. Its disk is slow or hangs: see its log, or set FLEET_SPARSE_KEPT_BYTES higher",
)
def _full_of_kept_pushes(_: Path) -> None:
    link = _acked_link(kept_bytes=384)
    assert not link.has_capacity(1, 96)
    raise link.no_capacity(300.0)


@entry(
    ShardUnavailable,
    "shard 0 at 127.0.0.1:1|127.0.0.1:2: no pserver reached in 2 s; last error: 127.0.0.1:<...>: Attach: <...>",
)
def _no_replica(_: Path) -> None:
    PserverReader(["127.0.0.1:1|127.0.0.1:2"], Settings(connect_s=2.0))


@entry(
    ShardUnavailable,
    "barrier 'b': shard 0 was started again, and worker 1 has not registered again in 0.05 s "
    "(FLEET_SPARSE_FAILOVER_S). Start the job again from its last snapshot",
)
def _does_not_return(where: Path) -> None:
    started = Supervised(is_restart=True, has_recovered=False, on_job=lambda: None, on_snapshot=lambda name: None)
    HeldControl(where, started, failover_s=0.05).call(barrier(1))


@entry(
    WorkerLost,
    "barrier 'b': worker 1 is lost, its connection ended and is not back after 2 s. Look into its log, and start "
    "the workers again",
)
def _dead(_: Path) -> None:
    members = job(2)
    members.leave(bytes([1]) * 16, 0.0)
    members.find_lost(31.0)
    members.arrive(Arrival("b", 1, 0), bytes(16), 31.0)


@entry(
    WorkerLost,
    "barrier 'b': worker 1 is lost, its registration was refused: table 'sgd': dim 2 and 8. Look into its log, "
    "and start the workers again",
)
def _refused(_: Path) -> None:
    members = job(2)
    members.refuse(registrant(1, 2), "table 'sgd': dim 2 and 8")
    members.arrive(Arrival("b", 1, 0), bytes(16), 0.0)


@entry(
    WorkerLost,
    "barrier 'b': worker 1 was started again, and the job of this process has ended. Start all workers again",
)
def _ended_job(_: Path) -> None:
    members = job(2)
    for worker in (0, 1):
        members.leave(bytes([worker]) * 16, 0.0)
    members.register(registrant(1, 2)._replace(client_id=b"in its place...."), 1.0)
    members.arrive(Arrival("b", 1, 0), bytes(16), 1.0)


@entry(
    WorkerLost,
    "barrier 'b': worker 1 never registered, 60 s after the first of 2 workers arrived. Look into its log, and "
    "start the workers again",
)
def _unseen(_: Path) -> None:
    members = job(2, 0)
    members.arrive(Arrival("b", 1, 0), bytes(16), 0.0)
    members.find_unseen(61.0)
    members.arrive(Arrival("b", 1, 0), bytes(16), 61.0)


@entry(
    WorkerLost,
    "shard 0 at pserver:0: step 1 cannot be completed: worker 1 is lost, it did not answer heartbeats. Look into "
    "its log, and start again from the last save",
)
def _lost_in_a_step(_: Path) -> None:
    with cluster_of(1) as cluster:
        first, _second = workers_of(cluster, 2)
        update(cluster, first, [1], 1)
        cluster.shards[0].evict_worker(1, "it did not answer heartbeats")
        pulled_for(cluster, first, [1], 2)


# Pushes


@entry(
    PushRefused,
    "shard 0 at pserver:0: table 'table': 4 of 4 gradients are NaN or infinite. If values are not finite, "
    "paddle.set_flags({'FLAGS_check_nan_inf': 1}) finds the op",
)
def _not_finite(_: Path) -> None:
    with cluster_of(1) as cluster:
        (client,) = workers_of(cluster, 1, mode=Mode(ASYNC))
        rows = RowBatch(
            cluster.table, unique_of(cluster, cluster.table, [1]), np.full((1, 4), np.nan, np.float32), 0.1, 1
        )
        client.push([rows])
        client.flush()


@entry(
    PushRefused,
    "shard 0 at pserver:0: step 1 cannot be completed: worker 1: table 'table': 4 of 4 gradients are NaN or "
    "infinite. If values are not finite, paddle.set_flags({'FLAGS_check_nan_inf': 1}) finds the op",
)
def _refused_step(_: Path) -> None:
    with cluster_of(1) as cluster:
        first, second = workers_of(cluster, 2)
        update(cluster, first, [1], 1)
        update(cluster, second, [1], 1, gradient=float("nan"))
        pulled_for(cluster, first, [1], 2)


@entry(
    PushRefused,
    "table 'sgd': has 19 rows and would get 2 more in this step, its size is 20. Give the embedding a larger "
    "size, or leave refuse_ids_past_size out",
)
def _size(_: Path) -> None:
    tables = [SimpleNamespace(name="sgd", num_rows=19)]
    pservers: Any = SimpleNamespace(
        stats=lambda: [SimpleNamespace(tables=tables)], flush=lambda: None, count_missing=lambda spec, unique: 2
    )
    with cluster_of(1) as cluster:
        unique = unique_of(cluster, SGD, [100, 101])
    limit = SizeLimit(pservers, pservers, 1, max_age_s=60.0)
    limit.check([RowBatch(SGD, unique, np.zeros((2, 2), np.float32), 0.1)], {"sgd": 20})


@entry(
    PushRefused,
    "dense parameters: 1 of 1 values of 'b' are NaN or infinite. Load the last snapshot with "
    "fleet.load_model(dirname, 0); paddle.set_flags({'FLAGS_check_nan_inf': 1}) finds the op",
)
def _dense_not_finite(_: Path) -> None:
    fleet.init()
    x = paddle.static.data("x", [-1, 1], "float32")
    parameters = [paddle.create_parameter([1], "float32", attr=paddle.ParamAttr(name=name)) for name in "ab"]
    loss = paddle.mean(x * parameters[1]) + paddle.mean(parameters[0])
    fleet.distributed_optimizer(paddle.optimizer.SGD(0.1), fleet.DistributedStrategy()).minimize(loss)
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(paddle.static.default_startup_program())
    fleet.init_worker()
    executor.run(feed={"x": np.full((1, 1), np.nan, np.float32)}, fetch_list=[])
    fleet.barrier_worker()


# Bytes on the wire


def parts() -> list[bytearray]:
    """A push on the wire."""
    with closing(make_shard(SGD)) as shard:
        frame = FrameClient(shard).frame(Op.PUSH, push(SGD, ids_of(7), floats([1, 1])))
        return [bytearray(part) for part in encode(frame)]


@entry(
    Forbidden,
    "control plane: Stop: role 'reader' may not ask for it. If this process should, set FLEET_SPARSE_ROLE=trainer "
    "and, if the job has keys, give it those of a trainer",
)
def _forbidden(where: Path) -> None:
    held = HeldControl(where)
    with (
        closing(ControlPlane("127.0.0.1:0", held.service, held.settings)) as served,
        ControlClient([f"127.0.0.1:{served.port}"], Settings(role="reader")) as control,
    ):
        control.stop()


@entry(
    Forbidden,
    "shard 0 at 127.0.0.1:6000: PUSH: its client id is not registered here. Register it first",
)
def _unregistered(_: Path) -> None:
    raise LinkErrors(0, "127.0.0.1:6000").refused(ErrorCode.FORBIDDEN, "unregistered PUSH")


@entry(
    DatasetError,
    "'<dir>/part-0', line 7, slot 'ids': value 2 is '1.5', should be an integer of 64 bits. Correct the file or its "
    "pipe_command, or make use_var the slots of the text, in the same order",
)
def _malformed(where: Path) -> None:
    _read_lines(where, "2 1 2\n" * 6 + "2 1 1.5\n", Slot("ids", False, (2,)))


@entry(
    DatasetError,
    "'<dir>/part-0', line 2, slot 'tags': has 3 values, should have 1, as the shape [-1, 1] of the input says. Give "
    "the input shape [-1, -1], which pads short lines with zeros, or add an input 'tags.lengths' of shape [-1] and "
    "int64 for the number of values of each line",
)
def _ragged(where: Path) -> None:
    slot = Slot("tags", False, (1,))
    FeedMaker([slot], ["tags"]).make(_read_lines(where, "1 5\n3 1 2 3\n", slot), np.arange(2))


@entry(
    DatasetError,
    "'<dir>/part-0': pipe_command 'exit 1' ended with status 1. Its messages are in the output of this worker",
)
def _failing_command(where: Path) -> None:
    _read_lines(where, "1 5\n", Slot("ids", False, (1,)), Pipe("exit 1"))


@entry(
    DatasetError,
    "'<dir>/part-0': pipe_command 'sleep 100' has written nothing for 0.2 s, should write or end. Look for what it "
    "waits for, or set FLEET_SPARSE_PIPE_S higher",
)
def _silent_command(where: Path) -> None:
    _read_lines(where, "1 5\n", Slot("ids", False, (1,)), Pipe("sleep 100", timeout_s=0.2))


@entry(
    DatasetError,
    "'<dir>/gone/part-0': cannot be read (No such file or directory). Correct the list of files: dataset.set_filelist",
)
def _missing_file(where: Path) -> None:
    list(text_of(str(where / "gone" / "part-0"), Pipe(), Processes()))


@entry(
    DatasetError,
    "'<dir>/part-0': 'bash', the shell that runs pipe_command 'sort', cannot be started (No such file or directory). "
    "Install it on this worker's machine, and put it on the PATH",
)
def _no_shell(where: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(where))
        _read_lines(where, "1 5\n", Slot("ids", False, (1,)), Pipe("sort"))


@entry(DatasetError, "'<dir>/part-0': has a line of more than 64 MB. Write one example per line")
def _endless_line(where: Path) -> None:
    (where / "part-0").write_bytes(b"1" * (66 << 20))
    list(text_of(str(where / "part-0"), Pipe(), Processes()))


@entry(
    DatasetError,
    "dataset: no batch for 0.05 s. Look for a file system that does not answer or a slow pipe_command, or set "
    "FLEET_SPARSE_PIPE_S higher",
)
def _no_batch(_: Path) -> None:
    is_over = Event()
    try:
        Reader(lambda: iter([None] * is_over.wait(60)), 0.05, "reader").next()
    finally:
        is_over.set()


def _read_lines(where: Path, text: str, slot: Slot, pipe: Pipe | None = None) -> Lines:
    (where / "part-0").write_text(text)
    source = Source((), (slot,), 0, pipe or Pipe(), 1, 1)
    (lines,) = source.lines_of([str(where / "part-0")], Processes())
    return lines


@entry(ProtocolError, "frame: checksum is wrong, the bytes changed on their way")
def _damaged(_: Path) -> None:
    damaged = parts()
    damaged[-1][0] ^= 1
    decode(damaged, max_bytes=1 << 20)


@entry(ProtocolError, "frame: version is 3, should be 2. Install the same fleet_sparse everywhere")
def _version(_: Path) -> None:
    newer = parts()
    newer[0][4] += 1
    decode(newer, max_bytes=1 << 20)


@entry(ProtocolError, "frame: has 208 bytes, the limit is 100. Split the request")
def _too_large(_: Path) -> None:
    decode(parts(), max_bytes=100)


@entry(ProtocolError, "shard 0 at pserver:0: header: cluster 0000000000000005, this one is 000000000000004d")
def _cluster(_: Path) -> None:
    with cluster_of(1) as cluster:
        workers_of(cluster, 1)
        others = [each._replace(cluster_id=5) for each in cluster.registrations()]
        with Client(cluster.channel, ClientIdentity(bytes(16), 1), others, cluster.placement, QUICK) as client:
            pulled(cluster, client, cluster.table, [1])


@entry(ProtocolError, "exchange 'shuffle': worker 0 asks for round 1, whose parts are dropped")
def _dropped_parts(where: Path) -> None:
    held = HeldControl(where)
    held.call(registration(SGD))
    for sequence in (1, 2, 1):
        held.call(messages.ExchangeRequest(name="shuffle", sequence=sequence, client_id=bytes(16), parts=[b"lines"]))


@entry(
    ProtocolError,
    "barrier 'gather': worker 0 asks for round 1, whose contributions are dropped. Pserver 0 was started again, and "
    "only a log keeps them, up to 1 MiB. Start the job again from its last snapshot",
)
def _dropped_contributions(where: Path) -> None:
    held = HeldControl(where)
    held.call(registration(SGD))
    for sequence in (1, 2, 1):
        request = barrier(0, "gather", sequence)
        request.contribution = b"values"
        held.call(request)


@entry(
    ProtocolError,
    "worker 0: another process has taken its place, and two snapshots were saved since. Start it again",
)
def _forgotten(where: Path) -> None:
    held = HeldControl(where, shard=make_shard(only_registered=True))
    request = registration(SGD)
    request.incarnations.append(held.shard.incarnation)  # it has registered, and is not known any more
    held.call(request)


@entry(
    ProtocolError,
    "shard 0: table 'table': the answer about copies is about 0 ids, should be about 3",
)
def _no_answer_about_copies(_: Path) -> None:
    with cluster_of(1) as cluster:
        answer_of(RowAsk(cluster.table, unique_of(cluster, cluster.table, IDS), NO_VERSIONS), [])


@entry(ProtocolError, "shard 0 at pserver:0: table 'table': asks about copies, the job has no row cache")
def _asks_without_a_cache(_: Path) -> None:
    with cluster_of(1) as cluster:
        (client,) = workers_of(cluster, 1)
        ask = RowAsk(cluster.table, unique_of(cluster, cluster.table, IDS), NO_VERSIONS)
        client.start_pull([], step=1, asks=[ask]).wait()


def send_change(num_states: int = 0, **fields: Any) -> None:
    """Has one of two workers send a change of rows of a table of SGD."""
    with cluster_of(1) as cluster:
        client, _ = workers_of(cluster, 2, mode=Mode(ASYNC, row_bound=RowBound(lag=10)))
        shape = len(IDS), cluster.table.dim
        states = np.ones((shape[0], num_states, shape[1]), np.float32) if num_states else None
        ones = np.ones(len(IDS), np.uint32)
        rows, unique = np.ones(shape, np.float32), unique_of(cluster, cluster.table, IDS)
        change = RowChange(cluster.table, unique, rows, ones, states, ones, 1.0, 1, is_whole=False)
        client.start_changes([change._replace(**fields)])
        client.flush()


@entry(
    ProtocolError,
    "shard 0 at pserver:0: table 'table': some counts of changes are 0, should be at least 1",
)
def _changes_of_no_update(_: Path) -> None:
    send_change(counts=np.zeros(len(IDS), np.uint32))


@entry(ProtocolError, "shard 0 at pserver:0: table 'table': states are (3, 1, 4), should be (3, 0, 4)")
def _states_of_another_size(_: Path) -> None:
    send_change(num_states=1)


@entry(
    ProtocolError,
    "shard 0 at pserver:0: table 'table': rows are assigned in a job of 2 workers, should be one",
)
def _assigned_rows(_: Path) -> None:
    send_change(is_whole=True)


# Leases and logs


@entry(
    LeaseLost,
    "shard-0-of-1: this process could not renew its lease, generation 3, for 10 s (FLEET_SPARSE_LEASE_S): it was "
    "suspended, or FLEET_SPARSE_COORDINATOR was out of reach. Another pserver may answer for the shard now; this one "
    "answers nothing",
)
def _lost_lease(where: Path) -> None:
    lease = take_lease(DirectoryCoordinator(where, "a job"), "shard-0-of-1", 10.0, job="a job", after=2)
    lease.lose()
    try:
        lease.check()
    finally:
        lease.release()


@entry(
    LeaseLost,
    "log '<dir>': a pserver with generation 5 writes it, this one has 4. Give all pservers of a shard the same "
    "FLEET_SPARSE_COORDINATOR",
)
def _later_writer(where: Path) -> None:
    former = small_writer(where, generation=4)
    small_writer(where, generation=5).close()
    try:
        former.begin_segment()
    finally:
        former.close()


@entry(
    LogFull,
    "<dir>: the disk has no room for a segment of <...> MiB of the log. Free some, or set FLEET_SPARSE_LOG to another "
    "disk",
)
def _no_room_for_a_segment(where: Path) -> None:
    with mock.patch("os.posix_fallocate", side_effect=OSError(errno.ENOSPC, "no space")):
        small_writer(where)


@entry(
    LogFull,
    "shard 0 at pserver:0: log '<dir>/log': the disk has had no room for 300 s (FLEET_SPARSE_FAILOVER_S). Free some, "
    "or set FLEET_SPARSE_LOG to another disk",
)
def _no_room_for_a_push(where: Path) -> None:
    shard = logged_shard(where / "log", SGD, failover_s=300.0)
    assert shard.log is not None
    shard.log.writer.full_since = time.monotonic() - 301
    try:
        shard.log.check_waits(100)
    except Refusal as refusal:
        raise LinkErrors(0, "pserver:0", lambda: "").refused(refusal.error.code, refusal.error.message) from None
    finally:
        close(shard)


@entry(
    LogFailed,
    "log '<dir>': the disk refused to write what was appended ([Errno 5] input/output error). This pserver answers "
    "nothing any more and ends. Look after the disk, or set FLEET_SPARSE_LOG to another one",
)
def _failed_sync(where: Path) -> None:
    writer = small_writer(where)
    writer.append(Kind.LOAD)
    try:
        with mock.patch("os.fdatasync", side_effect=OSError(errno.EIO, "input/output error")):
            writer.sync()
    finally:
        writer.close()


@entry(
    LogFailed,
    "log '<dir>': the thread that writes to the disk died of MemoryError(). This pserver answers nothing any more and "
    "ends",
)
def _died_thread(where: Path) -> None:
    writer = small_writer(where)
    try:
        with mock.patch.object(SegmentAhead, "allocate", side_effect=MemoryError):
            writer.request_sync()
            wait_until(lambda: writer.fault is not None)
        writer.append(Kind.LOAD)
    finally:
        writer.close()


@entry(
    LogCorrupt,
    "<dir>/log/00000000000000000001.fsl: a record with a wrong checksum, at byte 64. Start the job from its newest "
    "snapshot, without this log",
)
def _changed_record(where: Path) -> None:
    shard = logged_shard(where / "log", SGD)
    assert shard.log is not None
    shard.log.writer.sync()
    shard.add_table(ADAM, declared_by="worker 0")
    close(shard)
    path = where / "log" / "00000000000000000001.fsl"
    content = bytearray(path.read_bytes())
    content[150] ^= 1
    path.write_bytes(content)
    logged_shard(where / "log")


@entry(
    LogCorrupt,
    "<dir>/log/<...>.fsl: the segment of the checkpoint is missing, at byte 0. Start the job from its newest "
    "snapshot, without this log",
)
def _missing_segment(where: Path) -> None:
    shard = logged_shard(where / "log", SGD)
    write_checkpoint(shard)
    close(shard)
    next((where / "log").glob("0*.fsl")).unlink()
    logged_shard(where / "log")


# Snapshots


@entry(
    SnapshotError,
    "directory '/elsewhere': is '/elsewhere', should lie under '<dir>'. Set FLEET_SPARSE_ROOT of the pservers to "
    "a directory that contains it",
)
def _outside(where: Path) -> None:
    resolve_under(str(where), "/elsewhere")


@entry(SnapshotError, "<dir>: it has no snapshot; nothing was saved there, or no save was finished")
def _nothing(where: Path) -> None:
    load(make_shard(), directory_at(where))


@entry(SnapshotError, "<dir>/shard-0-of-1.fss: cannot be written: [Errno 27] File too large")
def _disk(where: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    file = directory_at(where).create("shard-0-of-1.fss")
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        file.write(bytes(1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        file.abandon()


@entry(
    SnapshotError,
    "<dir>/000001-full/shard-0-of-1.fss: cannot be opened: [Errno 2] No such file or directory: 'shard-0-of-1.fss'",
)
def _missing(where: Path) -> None:
    saves.save(saves.trained(1), where)
    (where / "000001-full" / "shard-0-of-1.fss").unlink()
    load(make_shard(), directory_at(where))


@entry(
    SnapshotError,
    "<dir>: it has no SERVING.json, so no model was saved there, or its save did not finish. Save it with "
    "fleet.save_inference_model",
)
def _no_model(where: Path) -> None:
    read_model(directory_at(where))


@entry(
    SnapshotError,
    "save 'model': worker 1 did not report its position within 0.2 s. Look into its log; raise "
    "FLEET_SPARSE_<...> if it is only slow",
)
def _position(where: Path) -> None:
    held = HeldControl(where)
    for worker in (0, 1):
        held.call(registration(SGD, worker=worker, num_workers=2, mode=Mode(ASYNC)))
    run(Coordinator(held).begin)


@entry(SnapshotError, "<dir>/000002-delta: its base 000001-full is missing. Load a snapshot whose base exists")
def _base(where: Path) -> None:
    shards = saves.trained(1)
    saves.save(shards, where)
    saves.save(shards, where, kind="delta", keep_last=None)
    (where / "000001-full").rename(where / "elsewhere")
    load(make_shard(), directory_at(where))


@entry(
    SnapshotError,
    "load l: nothing is staged under this id on shard 0; it may have been started again. It keeps what it holds, "
    "others may hold the snapshot: load again",
)
def _not_staged(where: Path) -> None:
    HeldControl(where).call(messages.FinishLoadRequest(load_id="l", keep=True))


@entry(
    SnapshotError,
    "000003-full: the snapshot is complete, but the day has not ended on all pservers. Load the snapshot, which has "
    "the day. save a: unknown",
)
def _day(_: Path) -> None:
    pservers = fake_pservers.FakePservers()
    pservers.fails("EndSave", SnapshotError("save a: unknown"), shard=1)
    with ControlClient(pservers, fake_pservers.QUICK) as control:
        save = control_save.Save(control, "model", ends_day=True)
        save.begin(Progress(5, ""))
        save.finish()


@entry(SnapshotError, "shrink: table 'none': there is no such table, the job has sgd")
def _shrunk_table(where: Path) -> None:
    held = HeldControl(where)
    held.call(registration(SGD))
    criterion = messages.ShrinkCriterion(name="min_norm", value=1.0)
    held.call(messages.ShrinkRequest(criteria=[criterion], decay=1.0, tables=["none"]))


@entry(SnapshotError, "a.fss: table 'sgd': what is served and the snapshot differ: dim 2 and 5")
def _another_model(_: Path) -> None:
    shard = ReadOnlyShard(0, 1, cluster_id=1, incarnation=2)
    shard.add(SGD)
    check_same(shard.tables[SGD.table_id], replace(SGD, dim=5), "a.fss")


@entry(SnapshotError, "<dir>: snapshot 1 was removed, or its save was not finished; there are 2")
def _removed(where: Path) -> None:
    shards = saves.trained(1)
    for _ in range(2):
        saves.save(shards, where)
    Versions(directory_at(where)).promote(1)


@entry(SnapshotError, "<dir>: snapshot 1 is served, and there is no version to return to from it")
def _way_back(where: Path) -> None:
    saves.save(saves.trained(1), where)
    Versions(directory_at(where)).rollback()


@entry(
    SnapshotError,
    "<dir>/SERVE.json: snapshot 7 (00000000000000ff), which it names, is not there. Write fleet-sparse version promote "
    "with another one, or unpin",
)
def _served_version(where: Path) -> None:
    content = ServeFile().changed("promote", Version(7, 255), None, changed_at="")
    write_serve_file(directory_at(where), content)
    served_chain(directory_at(where))


@entry(SnapshotCorrupt, "<dir>/000001-full/shard-0-of-1.fss: checksum mismatch in <...> bytes, at byte 64")
def _changed(where: Path) -> None:
    saves.save(saves.trained(1), where)
    path = where / "000001-full" / "shard-0-of-1.fss"
    content = bytearray(path.read_bytes())
    content[200] ^= 1
    path.write_bytes(content)
    load(make_shard(), directory_at(where))


@entry(
    SnapshotCorrupt, "<dir>/000001-full/shard-0-of-1.fss: it has <...> bytes, the manifest says <...>, at byte <...>"
)
def _short(where: Path) -> None:
    saves.save(saves.trained(1), where)
    path = where / "000001-full" / "shard-0-of-1.fss"
    path.write_bytes(path.read_bytes()[:-1])
    load(make_shard(), directory_at(where))


@entry(SnapshotCorrupt, "<dir>/SERVE.json: its checksum is <...>, should be <...>, at byte 0")
def _serve_file(where: Path) -> None:
    saves.save(saves.trained(1), where)
    Versions(directory_at(where)).pin()
    content = (where / "SERVE.json").read_text()
    (where / "SERVE.json").write_text(content.replace('"pin"', '"unpin"'))
    served_chain(directory_at(where))


def on_page() -> list[tuple[str, str]]:
    """Returns class and italic text of each entry of the page."""
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    sections = re.split(r"^## (\w+)\n", page, flags=re.M)
    return [
        (name, text)
        for name, section in zip(sections[1::2], sections[2::2], strict=True)
        for text in re.findall(r"^- \*(.+?)\*", section, re.M)
    ]


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.provoke.__name__.strip("_"))
def test_error_has_the_message_of_its_entry(entry: Entry, tmp_path: Path) -> None:
    with pytest.raises(FleetSparseError) as caught:
        entry.provoke(tmp_path)
    assert type(caught.value) is entry.error
    message = str(caught.value).replace(str(tmp_path), "<dir>")
    assert re.fullmatch(re.escape(entry.message).replace(re.escape("<...>"), ".+"), message), message


def test_every_entry_of_the_page_has_its_test() -> None:
    classes = [name for name, _ in on_page()]
    assert classes == [entry.error.__name__ for entry in ENTRIES]
    assert set(classes) == {kind.__name__ for kind in all_subclasses(FleetSparseError)}
    assert not [text for (_, text), entry in zip(on_page(), ENTRIES, strict=True) if text not in entry.message]


def all_subclasses(kind: type[FleetSparseError]) -> list[type[FleetSparseError]]:
    return [kind for each in kind.__subclasses__() for kind in (each, *all_subclasses(each))]
