"""Two workers of a sync job with row caches, of which worker 0 acts alone while the other waits at a barrier.

WHAT is what it does before it saves: load, or shrink. Prints the number of cached rows behind that, and at last how
many updates the rows have.
"""

import os

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
from program import minimize, start, table

import fleet_sparse

cache = fleet_sparse.RowCache(max_rows=40, admit="all")
rows = table(paddle.static.data("ids", [None], "int64"), "counter", dim=2)
evaluation = paddle.static.default_main_program().clone(for_test=True)
loss = paddle.sum(rows)
strategy = fleet_sparse.PserverStrategy(max_row_lag=40, row_cache=cache)
minimize(loss, paddle.optimizer.SGD(1.0), strategy, is_sync=True, scale="sum")
exe = start()


def train(num_steps):
    for _ in range(num_steps):
        exe.run(feed={"ids": np.arange(12)}, fetch_list=[])


def evaluated():
    (found,) = exe.run(evaluation, feed={"ids": np.arange(12)}, fetch_list=[rows])
    return -found[:, 0]


train(5)
fleet_sparse.save("model")  # by all workers
train(3)
fleet.barrier_worker()
if fleet.is_first_worker():
    if os.environ["WHAT"] == "load":
        fleet.load_model("model", 0)
    else:
        fleet_sparse.shrink(min_norm=1e9)
    fleet_sparse.save("later")
fleet.barrier_worker()
print("cached", fleet_sparse.stats()["row_cache"]["counter"]["rows"])
train(2)
fleet.barrier_worker()
print("updates", set(evaluated().tolist()))
fleet.barrier_worker()
fleet.stop_worker()
