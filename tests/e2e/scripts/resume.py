"""Sync training of a small model that saves, and resumes from its snapshot. Prints every loss, bit by bit.

EPOCHS is the number of batches of each worker in an epoch, as `7,5`; there are three epochs. SAVE_AT is the step after
which worker 0 saves; one step later each worker waits to be killed. SAVE_EVERY is the interval of saves in steps.
"""

import os
import time

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
from program import AHEAD, linear, minimize, note_next_push, start, table, wait_until_ahead

import fleet_sparse

item = paddle.static.data("item", [None, 4], "int64")
label = paddle.static.data("label", [None, 1], "float32")
logit = linear(paddle.sum(table(item, "items", None), axis=1), "w", 0.3)
loss = paddle.nn.functional.binary_cross_entropy_with_logits(logit, label)
strategy = None
if "ROW_LAG" in os.environ:
    cache = fleet_sparse.RowCache(max_rows=40, admit="all")
    strategy = fleet_sparse.PserverStrategy(max_row_lag=int(os.environ["ROW_LAG"]), row_cache=cache)
minimize(loss, paddle.optimizer.Adam(0.05), strategy)
if "SAVE_EVERY" in os.environ:
    fleet_sparse.save_every("model", steps=int(os.environ["SAVE_EVERY"]), keep_last=2)
exe = start()
worker = fleet.worker_index()


class Batches:
    """The batches of this worker in the current epoch."""

    def __init__(self):
        self.epoch = 0

    def __iter__(self):
        rng = np.random.default_rng([worker, self.epoch])
        for _ in range(int(os.environ["EPOCHS"].split(",")[worker])):
            yield {"item": rng.integers(0, 60, (8, 4)), "label": rng.integers(0, 2, (8, 1)).astype(np.float32)}


batches = Batches()
feeds = fleet_sparse.resumable(batches)
print("resumes at step", fleet_sparse.resume_step(), "epoch", feeds.epoch, flush=True)
step, save_at = 0, int(os.environ.get("SAVE_AT", "0"))
for epoch in range(feeds.epoch, 3):
    batches.epoch = epoch
    for feed in feeds:
        print("loss", float(exe.run(feed=feed, fetch_list=[loss])[0]).hex(), flush=True)
        step += 1
        if step == save_at and worker == 1:
            note_next_push()
        if step == save_at and worker == 0:
            wait_until_ahead()
            fleet_sparse.save("model")
            print("saved", flush=True)
        if save_at and step == save_at + 1:
            time.sleep(1000)
    if save_at and worker == 1:
        AHEAD.touch()  # it has fewer batches, and waits at the barrier
    fleet.barrier_worker()
fleet.stop_worker()
