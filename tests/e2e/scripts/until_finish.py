"""Async training with dense parameters that ends when a file `finish` exists in the working directory."""

from pathlib import Path

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
from program import linear, minimize, start, table

import fleet_sparse

rows = table(paddle.static.data("ids", [None], "int64"), "emb", None)
loss = paddle.mean(linear(rows + 1.0, "w", 0.0, bias_attr=False))
minimize(loss, paddle.optimizer.SGD(0.01), is_sync=False)
exe = start()
batches = fleet_sparse.resumable(range(10**9))
print("begins after", fleet_sparse.resume_step(), "steps", flush=True)
for step in batches:
    (value,) = exe.run(feed={"ids": np.arange(10)}, fetch_list=[loss])
    if step % 50 == 0:
        print(f"step {step} loss {float(value):g}", flush=True)
    if Path("finish").exists():
        break
fleet.barrier_worker()
print("met all workers", flush=True)
fleet.stop_worker()
