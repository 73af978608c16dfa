"""Sync training of two workers with an entry policy: an id is trained from the step after it was named 3 times.

In each step worker 0 names ids 1 and 2, worker 1 names ids 2 and 3. A step takes 0.25 from a row for each worker that
names its id. STEPS is the number of steps; SAVE=1 saves a delta after them, LOAD=1 begins with that.
"""

import os

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
from program import minimize, start

import fleet_sparse

ids = paddle.static.data("ids", [None], "int64")
kinds = {
    "exact": paddle.distributed.CountFilterEntry(3),
    "sketch": fleet_sparse.entry("count_filter", threshold=3, counter="sketch", num_ids=100_000),
}
attr = paddle.ParamAttr(name="emb", initializer=paddle.nn.initializer.Constant(0.75))
rows = paddle.static.nn.sparse_embedding(ids, [10, 2], entry=kinds[os.environ["ENTRY"]], param_attr=attr)
evaluation = paddle.static.default_main_program().clone(for_test=True)
minimize(paddle.sum(rows), paddle.optimizer.SGD(0.25), scale="sum")
exe = start()
if "LOAD" in os.environ:
    fleet.load_model("model", 0)
for step in range(int(os.environ["STEPS"])):
    exe.run(feed={"ids": np.array([1, 2]) + fleet.worker_index()})
    if step == 0 and "SAVE" in os.environ:
        fleet.save_persistables(exe, "model")
if "SAVE" in os.environ:
    fleet.save_persistables(exe, "model", mode=1)
fleet.barrier_worker()
for id_, value in enumerate(exe.run(evaluation, feed={"ids": np.arange(1, 5)}, fetch_list=[rows])[0][:, 0], 1):
    print(f"row {id_} {value:g}", flush=True)
print(f"rows {sum(pserver['rows'] for pserver in fleet_sparse.stats()['pservers'])}", flush=True)
fleet.stop_worker()
