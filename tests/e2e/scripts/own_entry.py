"""Trains one row with the entry policy "count_or_luck" of the module that FLEET_SPARSE_RULES names, and prints it."""

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
from program import minimize, start

import fleet_sparse

attr = paddle.ParamAttr(name="emb", initializer=paddle.nn.initializer.Constant(0.5))
entry = fleet_sparse.entry("count_or_luck", threshold=2, share=0)
ids = paddle.static.data("ids", [-1], "int64")
rows = paddle.static.nn.sparse_embedding(ids, [10, 2], entry=entry, param_attr=attr)
minimize(paddle.sum(rows), paddle.optimizer.SGD(0.25), is_sync=False)
executor = start()
for _ in range(4):
    (values,) = executor.run(feed={"ids": np.array([3])}, fetch_list=[rows])
    print("row", values.tolist(), flush=True)
fleet.stop_worker()
