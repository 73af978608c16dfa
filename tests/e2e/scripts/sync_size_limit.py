"""Sync training of two workers in which a table of 8 rows is full after the first step, and worker 1 wants another row.

Each worker makes 5 steps. The third of worker 1 names a new id, is refused and caught. Each step of a worker takes 1
from `weight` and from the rows that it trains. CLIP=1 clips by a global norm that no gradient reaches.
"""

import os

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
from program import minimize, start, table

import fleet_sparse

rows = table(paddle.static.data("ids", [None], "int64"), "emb", size=8, dim=1)
zero = paddle.ParamAttr(name="weight", initializer=paddle.nn.initializer.Constant(0.0))
weight = paddle.static.create_parameter([1], "float32", attr=zero)
evaluation = paddle.static.default_main_program().clone(for_test=True)
seen = weight + 0
clip = paddle.nn.ClipGradByGlobalNorm(1e6) if "CLIP" in os.environ else None
strategy = fleet_sparse.PserverStrategy(refuse_ids_past_size=True)
minimize(paddle.sum(rows) + paddle.sum(seen), paddle.optimizer.SGD(1.0, grad_clip=clip), strategy, scale="sum")
exe = start()
worker = fleet.worker_index()
for step in range(5):
    wanted = np.arange(8) if worker == 0 or step != 2 else np.array([0, 100])
    try:
        print(f"weight in {step} {exe.run(feed={'ids': wanted}, fetch_list=[seen])[0][0]:g}", flush=True)
    except fleet_sparse.PushRefused:
        print(f"step {step} refused", flush=True)
fleet.barrier_worker()
for row, value in enumerate(exe.run(evaluation, feed={"ids": np.arange(8)}, fetch_list=[rows])[0][:, 0]):
    print(f"row {row} {value:g}", flush=True)
print(f"rows {sum(pserver['tables']['emb'] for pserver in fleet_sparse.stats()['pservers'])}", flush=True)
fleet.stop_worker()
