"""Sync training of a small model, with barriers. Each worker writes its losses, bit by bit, to `losses`n.

LOOK_AHEAD, RULE, CLIP and ROW_CACHE choose early pulls, the optimizer, its clip, and copies of half of the rows. Each
of the 300 steps lasts some milliseconds.
"""

import os
import time
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
from program import linear, minimize, optimizer_of_environment, start, table

import fleet_sparse

NUM_STEPS, BARRIER_STEPS = 300, 5
item = paddle.static.data("item", [None, 4], "int64")
label = paddle.static.data("label", [None, 1], "float32")
logit = linear(paddle.sum(table(item, "items", None), axis=1), "w", 0.3)
loss = paddle.nn.functional.binary_cross_entropy_with_logits(logit, label)
cache = {"max_row_lag": 100, "row_cache": fleet_sparse.RowCache(max_rows=30)} if os.environ.get("ROW_CACHE") else {}
minimize(loss, optimizer_of_environment(), fleet_sparse.PserverStrategy(**cache))
exe = start()
worker = fleet.worker_index()
print("pid", os.getpid(), flush=True)


def batches():
    rng = np.random.default_rng(worker)
    for _ in range(NUM_STEPS):
        yield {"item": rng.integers(0, 60, (8, 4)), "label": rng.integers(0, 2, (8, 1)).astype(np.float32)}


feeds = fleet_sparse.look_ahead(batches()) if os.environ.get("LOOK_AHEAD") else batches()
with Path(f"losses{worker}").open("a", buffering=1) as losses:
    for step, feed in enumerate(feeds, 1):
        losses.write(f"{float(exe.run(feed=feed, fetch_list=[loss])[0]).hex()}\n")
        if step % BARRIER_STEPS == 0:
            fleet.barrier_worker()
            print(f"step {step}", flush=True)
        time.sleep(0.003)
fleet.stop_worker()
print("ended well", flush=True)
