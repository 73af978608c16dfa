"""Sync training that loads its snapshot while pservers and workers run. Prints every loss, bit by bit."""

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
weight = paddle.ParamAttr(name="w", initializer=paddle.nn.initializer.Constant(0.3))
loss = paddle.mean(paddle.square(paddle.static.nn.fc(paddle.sum(rows, axis=1), 1, weight_attr=weight) - 1.0))
strategy = fleet.DistributedStrategy()
strategy.a_sync = False
fleet.distributed_optimizer(paddle.optimizer.Adam(0.05), strategy).minimize(loss)
exe = paddle.static.Executor(paddle.CPUPlace())
exe.run(paddle.static.default_startup_program())
fleet.init_worker()


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
