"""Trains a few steps in one process, begins a save and ends without waiting for it."""

import numpy as np
import paddle
from program import minimize, start, table

import fleet_sparse

loss = paddle.mean(paddle.square(table(paddle.static.data("ids", [-1], "int64"), first=None)))
minimize(loss, paddle.optimizer.Adagrad(0.1), is_sync=False)
executor = start()
for _ in range(3):
    executor.run(feed={"ids": np.arange(200)}, fetch_list=[loss])
fleet_sparse.save("model", wait=False)
