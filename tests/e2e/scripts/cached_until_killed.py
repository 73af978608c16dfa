"""Async training with a row cache that goes on until it is killed, and counts its steps in each row."""

import numpy as np
import paddle
from program import minimize, start, table

import fleet_sparse

rows = table(paddle.static.data("ids", [None], "int64"), "counter")
evaluation = paddle.static.default_main_program().clone(for_test=True)
loss = paddle.sum(rows)
strategy = fleet_sparse.PserverStrategy(max_row_lag=100, row_cache=fleet_sparse.RowCache(max_rows=40))
minimize(loss, paddle.optimizer.SGD(1.0), strategy, is_sync=False)
exe = start()
feed = {"ids": np.arange(10)}
batches = fleet_sparse.resumable(range(10**9))
(found,) = exe.run(evaluation, feed=feed, fetch_list=[rows])
print(f"begins after {fleet_sparse.resume_step()} steps, of which rows have {abs(found).min():g}", flush=True)
for step in batches:
    exe.run(feed=feed, fetch_list=[])
    if step % 50 == 0:
        print(f"step {step} held {fleet_sparse.stats()['row_cache']['counter']['held']}", flush=True)
