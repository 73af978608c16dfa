"""Sync training of a small model that resumes by itself. Each worker writes its losses, bit by bit, to `losses`n.

RULE and CLIP choose optimizer and clip; worker 0 saves every 7 steps. There are two epochs of 60 batches. KILLS is the
number of processes that will be killed: after step 50 of its n-th life each worker waits for a file `go`n.
"""

import os
import time
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
from program import linear, minimize, optimizer_of_environment, start, table

import fleet_sparse

NUM_BATCHES = 60
item = paddle.static.data("item", [None, 4], "int64")
label = paddle.static.data("label", [None, 1], "float32")
logit = linear(paddle.sum(table(item, "items", None), axis=1), "w", 0.3)
loss = paddle.nn.functional.binary_cross_entropy_with_logits(logit, label)
minimize(loss, optimizer_of_environment())
fleet_sparse.save_every("model", steps=7)
exe = start()
worker = fleet.worker_index()
print("pid", os.getpid(), flush=True)


class Batches:
    """The batches of this worker in the current epoch."""

    epoch = 0

    def __iter__(self):
        rng = np.random.default_rng([worker, self.epoch])
        for _ in range(NUM_BATCHES):
            yield {"item": rng.integers(0, 60, (8, 4)), "label": rng.integers(0, 2, (8, 1)).astype(np.float32)}


batches = Batches()
feeds = fleet_sparse.resumable(batches)
step = fleet_sparse.resume("model")
print("resumes at", step, flush=True)
lives = Path(f"lives{worker}")
life = 1 + lives.stat().st_size if lives.exists() else 1
lives.write_text(life * "x")
losses = Path(f"losses{worker}").open("a", buffering=1)  # noqa: SIM115  # until the process ends
try:
    for epoch in range(feeds.epoch, 2):
        batches.epoch = epoch
        for feed in feeds:
            if step == 50 and life <= int(os.environ.get("KILLS", "0")):
                print("waits", flush=True)
                while not Path(f"go{life}").exists():
                    time.sleep(0.01)
            step += 1
            losses.write(f"{step} {float(exe.run(feed=feed, fetch_list=[loss])[0]).hex()}\n")
finally:
    fleet.save_persistables(exe, "model")
fleet.barrier_worker()
fleet.stop_worker()
print("ended well", flush=True)
