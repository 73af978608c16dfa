"""Sync training in which all workers have equal batches, from the snapshot that the pservers loaded. Prints every loss.

STEPS are the numbers of the first and the last step, as `5,10`; SAVE names the directory of the snapshot.
"""

import os

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
from program import linear, minimize, start, table

rows = table(paddle.static.data("item", [None, 4], "int64"), "items", None)
first = paddle.ParamAttr(name="w0", initializer=paddle.nn.initializer.Constant(0.3))
half = paddle.ParamAttr(name="b1", learning_rate=0.5, initializer=paddle.nn.initializer.Constant(0.0))
hidden = paddle.static.nn.fc(paddle.sum(rows, axis=1), 5, weight_attr=first, activation="tanh")
loss = paddle.mean(paddle.square(linear(hidden, "w1", 0.3, bias_attr=half) - 1.0))
minimize(loss, paddle.optimizer.Adam(0.01))
exe = start()
for step in range(*map(int, os.environ["STEPS"].split(","))):
    feed = {"item": np.random.default_rng(step).integers(0, 60, (8, 4))}
    print("loss", float(exe.run(feed=feed, fetch_list=[loss])[0]), flush=True)
fleet.barrier_worker()
fleet.save_persistables(exe, os.environ["SAVE"])
fleet.barrier_worker()
fleet.stop_worker()
