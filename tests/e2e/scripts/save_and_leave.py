"""Trains a few steps in one process, begins a save and ends without waiting for it."""

import numpy as np
import paddle
import paddle.distributed.fleet as fleet

import fleet_sparse

fleet_sparse.install()
paddle.enable_static()
fleet.init()
ids = paddle.static.data("ids", [-1, 1], "int64")
rows = paddle.static.nn.embedding(ids, size=[10**6, 4], is_sparse=True, is_distributed=True)
loss = paddle.mean(paddle.square(rows))
fleet.distributed_optimizer(paddle.optimizer.Adagrad(0.1)).minimize(loss)
executor = paddle.static.Executor()
executor.run(paddle.static.default_startup_program())
fleet.init_worker()
for _ in range(3):
    executor.run(feed={"ids": np.arange(200).reshape(-1, 1)}, fetch_list=[loss])
fleet_sparse.save("model", wait=False)
