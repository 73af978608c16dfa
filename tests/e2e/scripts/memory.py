"""Trains a table of SIZE ids for a few steps; prints the peak memory of the process."""

import os
import resource

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
from program import minimize, start, table

ids = paddle.static.data("ids", [None], "int64")
loss = paddle.mean(table(ids, first=None, size=int(os.environ["SIZE"]), dim=16))
minimize(loss, paddle.optimizer.Adam(0.1, lazy_mode=True), is_sync=False)
exe = start()
for _ in range(5):
    exe.run(feed={"ids": np.arange(10)}, fetch_list=[loss])
fleet.stop_worker()
print("peak MB", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, flush=True)
