"""Parts that the scripts of this directory share: the plugin in static mode, tables, an optimizer, and a role.

`sparse_embedding.py` and `distributed_embedding.py` are without it, as users write theirs.
"""

import paddle
import paddle.distributed.fleet as fleet

import fleet_sparse

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


def minimize(loss, optimizer, strategy=None, *, is_sync=True, scale="avg"):
    strategy = strategy or fleet.DistributedStrategy()
    strategy.a_sync = not is_sync
    if scale != "avg":
        strategy.gradient_scale_configs = {"scale_strategy": scale}
    fleet.distributed_optimizer(optimizer, strategy).minimize(loss)


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
