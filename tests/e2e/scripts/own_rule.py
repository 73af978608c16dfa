"""Trains one row with the rule "sign" of the module that FLEET_SPARSE_RULES names, and prints it after each step."""

from __future__ import annotations

import numpy as np
import paddle
import paddle.distributed.fleet as fleet

import fleet_sparse

fleet_sparse.install()
paddle.enable_static()
fleet.init()
attr = paddle.ParamAttr(name="emb", initializer=paddle.nn.initializer.Constant(0.5))
ids = paddle.static.data("ids", [-1], "int64")
rows = paddle.static.nn.embedding(ids, size=[10, 2], is_sparse=True, is_distributed=True, param_attr=attr)
strategy = fleet.DistributedStrategy()
strategy.a_sync = True
optimizer = fleet_sparse.PserverOptimizer("sign", 0.25)
fleet.distributed_optimizer(optimizer, strategy).minimize(paddle.sum(rows * 7.0))
executor = paddle.static.Executor(paddle.CPUPlace())
executor.run(paddle.static.default_startup_program())
fleet.init_worker()
for _ in range(3):
    (values,) = executor.run(feed={"ids": np.array([3])}, fetch_list=[rows])
    print("row", values.tolist(), flush=True)
fleet.stop_worker()
