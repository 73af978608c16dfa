"""Sync training of a small model with wide rows. Prints every loss, bit by bit, and the bytes of this worker."""

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
from program import linear, minimize, start, table

import fleet_sparse

rows = table(paddle.static.data("ids", [None, 4], "int64"), "emb", None, dim=64)
logit = linear(paddle.sum(rows, axis=1), "w", 0.1)
label = paddle.static.data("label", [None, 1], "float32")
loss = paddle.nn.functional.binary_cross_entropy_with_logits(logit, label)
minimize(loss, paddle.optimizer.Adagrad(0.05))
exe = start()
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
