"""Trains one row with the rule "sign" of the module that FLEET_SPARSE_RULES names, and prints it after each step."""

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
from program import minimize, start, table

import fleet_sparse

rows = table(paddle.static.data("ids", [-1], "int64"), "emb", 0.5, dim=2)
minimize(paddle.sum(rows * 7.0), fleet_sparse.PserverOptimizer("sign", 0.25), is_sync=False)
executor = start()
for _ in range(3):
    (values,) = executor.run(feed={"ids": np.array([3])}, fetch_list=[rows])
    print("row", values.tolist(), flush=True)
fleet.stop_worker()
