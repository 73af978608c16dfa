"""Parts that the scripts of this directory share: the plugin in static mode, tables, an optimizer, and a role.

`sparse_embedding.py` and `distributed_embedding.py` are without it, as users write theirs.
"""

import os
import threading
import time
from pathlib import Path

import paddle
import paddle.distributed.fleet as fleet

import fleet_sparse
from fleet_sparse.plugin.active_session import active
from fleet_sparse.tools.parity.training import OPTIMIZERS

fleet_sparse.install()
paddle.enable_static()
fleet.init()


def table(ids, name=None, first=0.0, *, size=10**9, dim=4):
    """Rows of a table; `first` is their first value, or None for random ones."""
    initializer = paddle.nn.initializer.Uniform(-0.1, 0.1) if first is None else paddle.nn.initializer.Constant(first)
    attr = paddle.ParamAttr(name=name, initializer=initializer)
    return paddle.static.nn.embedding(ids, size=[size, dim], is_sparse=True, is_distributed=True, param_attr=attr)


def linear(features, name, first, **arguments):
    """A dense layer with one output, whose first weights are `first`."""
    attr = paddle.ParamAttr(name=name, initializer=paddle.nn.initializer.Constant(first))
    return paddle.static.nn.fc(features, 1, weight_attr=attr, **arguments)


def optimizer_of_environment():
    """The optimizer of the rule RULE, by default Adam, which clips by global norm with CLIP."""
    clip = paddle.nn.ClipGradByGlobalNorm(0.01) if os.environ.get("CLIP") else None
    rule = os.environ.get("RULE", "adam")
    if rule == "ftrl":
        return fleet_sparse.PserverOptimizer("ftrl", 0.05, grad_clip=clip)
    return OPTIMIZERS[rule](grad_clip=clip)


def minimize(loss, optimizer, strategy=None, *, is_sync=True, scale="avg"):
    strategy = strategy or fleet.DistributedStrategy()
    strategy.a_sync = not is_sync
    if scale != "avg":
        strategy.gradient_scale_configs = {"scale_strategy": scale}
    fleet.distributed_optimizer(optimizer, strategy).minimize(loss)


AHEAD = Path("ahead")


def note_next_push():
    """Makes `AHEAD` once this worker has sent its next push; in sync training it then waits for the other worker."""
    client = active().connection("e2e").client
    num_rows = client.num_pushed_rows

    def watch():
        while client.num_pushed_rows == num_rows:
            time.sleep(0.005)
        AHEAD.touch()

    threading.Thread(target=watch, daemon=True).start()


def wait_until_ahead():
    """Waits for `AHEAD`, which the other worker makes."""
    while not AHEAD.exists():
        time.sleep(0.005)


def start(load=None):
    """Becomes a pserver, or a worker with an executor, which is returned."""
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
    exe = paddle.static.Executor(paddle.CPUPlace())
    exe.run(paddle.static.default_startup_program())
    if load is not None:
        fleet.init_server(load)
    fleet.init_worker()
    return exe
