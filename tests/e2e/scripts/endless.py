"""Trains until it is killed. Prints `step` after its first steps."""

import itertools

import numpy as np
import paddle
from program import minimize, start, table

loss = paddle.mean(paddle.square(table(paddle.static.data("ids", [None], "int64"), first=None)))
minimize(loss, paddle.optimizer.SGD(0.1), is_sync=False)
exe = start()
for step in itertools.count():
    exe.run(feed={"ids": np.arange(100) + step}, fetch_list=[loss])
    if step % 50 == 0:
        print("step", step, flush=True)
