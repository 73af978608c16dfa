"""Trains a dense layer of several megabytes, saves, trains on, and loads; prints losses and a sum of the weights."""

import os

import numpy as np
import paddle
import paddle.distributed.fleet as fleet

import fleet_sparse

SIZE = 900
K_STEPS = int(os.environ.get("K_STEPS", "0"))

fleet_sparse.install()
paddle.enable_static()
paddle.seed(1)
fleet.init()
ids = paddle.static.data("ids", [-1, 1], "int64")
rows = paddle.static.nn.embedding(ids, [10**9, SIZE], is_sparse=True, is_distributed=True)
weight = paddle.ParamAttr(name="weight", initializer=paddle.nn.initializer.Constant(0.001))
hidden = paddle.static.nn.fc(paddle.reshape(rows, [-1, SIZE]), SIZE, weight_attr=weight, activation="tanh")
loss = paddle.mean(hidden * hidden)
strategy = fleet.DistributedStrategy()
strategy.a_sync = K_STEPS > 0
strategy.a_sync_configs = {"k_steps": K_STEPS}
clip = None if K_STEPS else paddle.nn.ClipGradByGlobalNorm(0.01)
fleet.distributed_optimizer(paddle.optimizer.Adam(0.01, grad_clip=clip), strategy).minimize(loss)
exe = paddle.static.Executor(paddle.CPUPlace())
exe.run(paddle.static.default_startup_program())
fleet.init_worker()
scope = paddle.static.global_scope()


def train(step):
    feed = {"ids": np.array([[step], [100 * fleet.worker_index()]])}
    print("loss", float(exe.run(feed=feed, fetch_list=[loss])[0]), flush=True)


def total():
    return float(np.array(scope.find_var("weight").get_tensor()).sum(dtype=np.float64))


for step in range(3):
    train(step)
fleet.barrier_worker()
if fleet.is_first_worker():
    fleet.save_persistables(exe, "model")
fleet.barrier_worker()
saved = total()
train(3)
fleet.barrier_worker()
changed = total()
fleet.load_model("model", 0)
print("weights", saved, total(), flush=True)
assert changed != saved
fleet.stop_worker()
