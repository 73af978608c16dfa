"""Training in which each worker counts its steps in rows of its own, one a shard at least.

It ends when a file `finish` exists; worker 0 saves after step 20. MODE is async, lag, geo or sync.
At step FAILS worker 1 raises an error. With WAITS all workers meet before `init_worker`, worker 1 once a file `goes`
exists. With RESUMES all workers call `resume` first. With a bounded lag a worker that
is started again counts on from its step.
"""

import itertools
import os
import time
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
from program import linear, start, table

import fleet_sparse

mode = os.environ.get("MODE", "async")
strategy = fleet_sparse.PserverStrategy(
    max_step_lag=4 if mode == "lag" else None, delta_scale="sum" if mode == "geo" else "avg"
)
strategy.a_sync = mode != "sync"
if mode == "geo":
    strategy.a_sync_configs = {"k_steps": 2}
rows = table(paddle.static.data("ids", [None], "int64"), "counter", dim=1)
evaluation = paddle.static.default_main_program().clone(for_test=True)
loss, feed = paddle.sum(rows), {}
if mode not in ("geo", "sync"):  # in geo training dense values have pushes of their own, on one shard
    x, feed["x"] = paddle.static.data("x", [None, 1], "float32"), np.zeros([1, 1], np.float32)
    loss += paddle.sum(linear(x, "w", 1.0, bias_attr=False))
fleet.distributed_optimizer(paddle.optimizer.SGD(1.0), strategy).minimize(loss)
if os.environ.get("WAITS") and fleet.is_worker():
    while fleet.worker_index() == 1 and not Path("goes").exists():
        time.sleep(0.01)
    fleet.barrier_worker()
exe = start()
if os.environ.get("RESUMES"):
    fleet_sparse.resume("model")
worker = fleet.worker_index()
ids = np.arange(100 * worker, 100 * worker + 64)
feed["ids"] = ids
slowest_s, num_steps = 0.0, 0
print("pid", os.getpid(), flush=True)
begun_behind = fleet_sparse.resume_step() if mode == "lag" else 0
for step in itertools.count(begun_behind + 1):
    begun_at = time.monotonic()
    exe.run(feed=feed, fetch_list=[loss])
    num_steps, slowest_s = step, max(slowest_s, time.monotonic() - begun_at)
    if step % 50 == 0:
        print(f"step {step}", flush=True)
    if step == 20 and worker == 0:
        fleet.save_persistables(exe, "model")
        print("saved", flush=True)
    if worker == 1 and step == int(os.environ.get("FAILS", "0")):
        raise RuntimeError
    if mode == "sync":  # all end at one step, because a step of fewer workers is the mean of fewer gradients
        if worker == 0 and Path("finish").exists() and not Path("last").exists():
            Path("last.part").write_text(str(step + 2))  # no worker is more than one step ahead
            Path("last.part").rename("last")
        if Path("last").exists() and step == int(Path("last").read_text()):
            break
    elif Path("finish").exists():
        break
    time.sleep(0.002)
fleet.barrier_worker()
values = exe.run(evaluation, feed={"ids": ids}, fetch_list=[rows])[0].reshape(-1)
print("slowest step", slowest_s, flush=True)
scale = fleet.worker_num() if mode == "sync" else 1  # a sync step is the mean of the workers' gradients
print("counted", num_steps, *[int(-value * scale) for value in values], flush=True)
fleet.barrier_worker()
fleet.stop_worker()
print("ended well", flush=True)
