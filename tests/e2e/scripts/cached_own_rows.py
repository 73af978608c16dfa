"""Two workers that cache rows, each with a row of its own, train with SGD and the mean of gradients, as sync does.

The row of each worker goes from 0 towards 1 as without a cache, which is computed here. With CLIP=1 gradients are
clipped by their global norm.
"""

import math
import os

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
from program import minimize, start, table

import fleet_sparse

RATE, NORM, NUM_STEPS = 0.5, 0.01, 60
clip = paddle.nn.ClipGradByGlobalNorm(NORM) if os.environ.get("CLIP") else None
strategy = fleet_sparse.PserverStrategy(max_row_lag=100, row_cache=fleet_sparse.RowCache(max_rows=40, admit="all"))
rows = table(paddle.static.data("ids", [None], "int64"), "counter", dim=1)
evaluation = paddle.static.default_main_program().clone(for_test=True)
loss = paddle.mean(paddle.square(rows - 1.0))
minimize(loss, paddle.optimizer.SGD(RATE, grad_clip=clip), strategy)
exe = start()
expected = 0.0
for _ in range(NUM_STEPS):
    (seen,) = exe.run(feed={"ids": np.array([fleet.worker_index()])}, fetch_list=[rows])
    np.testing.assert_allclose(seen, [[expected]], rtol=1e-4, atol=1e-6)
    grad = 2 * (expected - 1) / 2  # merged: of both rows
    norm = math.sqrt(2) * abs(grad)
    expected -= RATE * grad * (min(1.0, NORM / norm) if clip is not None else 1.0)
fleet.barrier_worker()
(found,) = exe.run(evaluation, feed={"ids": np.arange(2)}, fetch_list=[rows])
np.testing.assert_allclose(found, [[expected]] * 2, rtol=1e-4)
stats = fleet_sparse.stats()["row_cache"]["counter"]
assert stats["hits"] > NUM_STEPS / 2, stats
fleet.barrier_worker()
fleet.stop_worker()
print("ended well")
