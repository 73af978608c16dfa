"""Sync training that loads its snapshot while pservers and workers run. Prints every loss, bit by bit."""

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
from program import linear, minimize, start, table

import fleet_sparse

rows = table(paddle.static.data("item", [None, 4], "int64"), "items", None)
loss = paddle.mean(paddle.square(linear(paddle.sum(rows, axis=1), "w", 0.3) - 1.0))
minimize(loss, paddle.optimizer.Adam(0.05))
exe = start()


def train(what, seed, first_id=0):
    rng = np.random.default_rng([seed, fleet.worker_index()])
    for _ in range(5):
        feed = {"item": first_id + rng.integers(0, 60, (8, 4))}
        print(what, float(exe.run(feed=feed, fetch_list=[loss])[0]).hex(), flush=True)


def num_rows():
    return sum(pserver["rows"] for pserver in fleet_sparse.stats()["pservers"])


train("before", 0)
fleet.barrier_worker()
fleet.save_persistables(exe, "model", mode=3)
fleet.barrier_worker()
train("after", 1)
fleet.load_model("model", 0)
train("after", 1)
fleet.barrier_worker()
before = num_rows()
fleet.save_persistables(exe, "model", mode=3)
fleet.barrier_worker()
train("other", 2, first_id=1000)
fleet.barrier_worker()
fleet.save_persistables(exe, "elsewhere", mode=3)
fleet.shrink(1)
print("rows", before, "and then", num_rows())
try:
    fleet.load_model("nowhere", 0)
except fleet_sparse.SnapshotError as error:
    print("refused:", error)
train("other", 3)
fleet.stop_worker()
