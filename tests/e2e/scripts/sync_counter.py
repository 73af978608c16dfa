"""Sync training of one row, which is minus the sum over all steps of the number of workers that pushed.

STEPS is the number of steps of each worker, as `10,7`; without it they train until they are killed. SAVE_AT is the
step after which worker 0, and no other one, saves. LOAD loads the snapshot, in a job of one process.
"""

import itertools
import os
import time

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
from program import minimize, start, table

rows = table(paddle.static.data("ids", [None], "int64"), "counter", dim=1)
evaluation = paddle.static.default_main_program().clone(for_test=True)
minimize(paddle.sum(rows), paddle.optimizer.SGD(1.0), scale="sum")
exe = start("model" if "LOAD" in os.environ else None)
worker, feed = fleet.worker_index(), {"ids": np.array([7])}
steps = [int(number) for number in os.environ["STEPS"].split(",")] if "STEPS" in os.environ else None
for step in itertools.count() if steps is None else range(steps[worker]):
    seen = exe.run(feed=feed, fetch_list=[rows])[0][0, 0]
    if steps is None and step % 50 == 0:
        print("step", step, flush=True)
    if steps is not None:
        print(f"step {step} saw {seen:g}", flush=True)
    if worker == 0 and step + 1 == int(os.environ.get("SAVE_AT", "0")):
        time.sleep(0.5)  # the others' next pushes are waiting by now
        fleet.save_persistables(exe, "model")
fleet.barrier_worker()
print(f"count {exe.run(feed=feed, program=evaluation, fetch_list=[rows])[0][0, 0]:g}", flush=True)
fleet.stop_worker()
