"""Sync training in which all workers have equal batches, from the snapshot that the pservers loaded. Prints every loss.

STEPS are the numbers of the first and the last step, as `5,10`; SAVE names the directory of the snapshot.
"""

import os

import numpy as np
import paddle
import paddle.distributed.fleet as fleet

import fleet_sparse

fleet_sparse.install()
paddle.enable_static()
fleet.init()
attr = paddle.ParamAttr(name="items", initializer=paddle.nn.initializer.Uniform(-0.1, 0.1))
item = paddle.static.data("item", [None, 4], "int64")
rows = paddle.static.nn.embedding(item, size=[10**9, 4], is_sparse=True, is_distributed=True, param_attr=attr)
weights = [
    paddle.ParamAttr(name=f"w{number}", initializer=paddle.nn.initializer.Constant(0.3), learning_rate=rate)
    for number, rate in enumerate((1.0, 0.5))
]
hidden = paddle.static.nn.fc(paddle.sum(rows, axis=1), 5, weight_attr=weights[0], activation="tanh")
loss = paddle.mean(paddle.square(paddle.static.nn.fc(hidden, 1, weight_attr=weights[1]) - 1.0))
strategy = fleet.DistributedStrategy()
strategy.a_sync = False
fleet.distributed_optimizer(paddle.optimizer.Adam(0.01), strategy).minimize(loss)
exe = paddle.static.Executor(paddle.CPUPlace())
exe.run(paddle.static.default_startup_program())
fleet.init_worker()
first, last = map(int, os.environ["STEPS"].split(","))
for step in range(first, last):
    feed = {"item": np.random.default_rng(step).integers(0, 60, (8, 4))}
    print("loss", float(exe.run(feed=feed, fetch_list=[loss])[0]), flush=True)
fleet.barrier_worker()
fleet.save_persistables(exe, os.environ["SAVE"])
fleet.barrier_worker()
fleet.stop_worker()
