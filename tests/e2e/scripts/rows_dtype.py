"""Sync training of a small model with wide rows. Prints every loss, bit by bit, and the bytes of this worker."""

import numpy as np
import paddle
import paddle.distributed.fleet as fleet

import fleet_sparse

fleet_sparse.install()
paddle.enable_static()
fleet.init()

ids = paddle.static.data("ids", [None, 4], "int64")
label = paddle.static.data("label", [None, 1], "float32")
attr = paddle.ParamAttr(name="emb", initializer=paddle.nn.initializer.Uniform(-0.1, 0.1))
rows = paddle.static.nn.embedding(ids, size=[10**9, 64], is_sparse=True, is_distributed=True, param_attr=attr)
first_weight = paddle.ParamAttr(name="w", initializer=paddle.nn.initializer.Constant(0.1))
logit = paddle.static.nn.fc(paddle.sum(rows, axis=1), 1, weight_attr=first_weight)
loss = paddle.nn.functional.binary_cross_entropy_with_logits(logit, label)
strategy = fleet.DistributedStrategy()
strategy.a_sync = False
fleet.distributed_optimizer(paddle.optimizer.Adagrad(0.05), strategy).minimize(loss)
exe = paddle.static.Executor(paddle.CPUPlace())
exe.run(paddle.static.default_startup_program())
fleet.init_worker()
rng = np.random.default_rng(fleet.worker_index())
is_good = np.random.default_rng(99).random(500) < 0.4
for _ in range(60):
    batch = rng.integers(0, 500, (64, 4))
    labels = (is_good[batch].sum(1, keepdims=True) > 1).astype(np.float32)
    print("loss", float(exe.run(feed={"ids": batch, "label": labels}, fetch_list=[loss])[0]).hex(), flush=True)
fleet.barrier_worker()
stats = fleet_sparse.stats()
print("bytes", stats["bytes_pulled"] + stats["bytes_pushed"])
fleet.stop_worker()
