"""Workers that cache rows of one table: in each step every worker adds 1 to its own value of the rows that it looks up,
and to a dense parameter.

MODE is async, lag or sync, LOOK_AHEAD chooses it, LOGS shows what workers log. Each step checks that the worker sees
its own updates, and at most LAG fewer of the other's than that one had made before; in async with look-ahead, which
pulls rows without a copy early, than before the last step. After a barrier the rows have all updates, and so has a
snapshot: in sync of all workers, else of worker 0.
"""

import logging
import os
import time
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
from program import minimize, start, table

import fleet_sparse
from fleet_sparse.plugin.active_session import active

if "LOGS" in os.environ:
    logging.basicConfig(level=logging.INFO)
LAG, NUM_IDS, NUM_STEPS = 40, 60, 80
mode, num_workers, worker = os.environ["MODE"], fleet.worker_num(), fleet.worker_index()
strategy = fleet_sparse.PserverStrategy(
    max_step_lag=4 if mode == "lag" else None,
    max_row_lag=LAG,
    row_cache=fleet_sparse.RowCache(max_rows=40, admit="all"),
)
rows = table(paddle.static.data("ids", [None], "int64"), "counter", dim=num_workers)
evaluation = paddle.static.default_main_program().clone(for_test=True)
own = paddle.static.data("own", [num_workers, 1], "float32")
total = paddle.static.create_parameter([1], "float32", "total", default_initializer=paddle.nn.initializer.Constant(0.0))
loss = paddle.sum(paddle.matmul(rows, own)) - paddle.sum(total)
minimize(loss, paddle.optimizer.SGD(1.0), strategy, is_sync=mode == "sync", scale="sum" if mode == "sync" else "avg")
exe = start()
column = np.zeros((num_workers, 1), np.float32)
column[worker] = -1
rng = np.random.default_rng(worker)
weights = 1.0 / np.arange(1, NUM_IDS + 1)


def batches(num_steps):
    for _ in range(num_steps):
        yield {"ids": rng.choice(NUM_IDS, 12, replace=False, p=weights / weights.sum()), "own": column}


def passed(num_steps):
    feeds = batches(num_steps)
    return fleet_sparse.look_ahead(feeds) if os.environ.get("LOOK_AHEAD") else feeds


num_made = np.zeros(NUM_IDS, np.int64)
shown = np.memmap(f"shown{worker}", np.int64, "w+", shape=NUM_IDS)  # its updates, for the other worker
fleet.barrier_worker()
other = 1 - worker
of_other = np.memmap(f"shown{other}", np.int64, "r", shape=NUM_IDS)
pulls_early = os.environ.get("LOOK_AHEAD") and mode != "sync"
client = active().connection("e2e").client
most_lacked = 0
for _ in range(2):
    before = of_other.copy()
    for feed in passed(NUM_STEPS // 2):
        now = of_other.copy()
        (seen,) = exe.run(feed=feed, fetch_list=[rows])
        np.testing.assert_array_equal(seen[:, worker], num_made[feed["ids"]])
        lacked = (before if pulls_early else now)[feed["ids"]] - seen[:, other]
        assert lacked.max() <= LAG, lacked
        most_lacked = max(most_lacked, lacked.max())
        before = now
        num_made[feed["ids"]] += 1
        client.flush()  # what is on its way is not made yet
        shown[:] = num_made
    fleet.barrier_worker()
    np.save(f"made{worker}.part", num_made)
    Path(f"made{worker}.part.npy").rename(f"made{worker}.npy")
    fleet.barrier_worker()
    made = np.stack([np.load(f"made{each}.npy") for each in range(num_workers)], axis=1)
    (found,) = exe.run(evaluation, feed={"ids": np.arange(NUM_IDS)}, fetch_list=[rows])
    np.testing.assert_array_equal(found, made)
    fleet.barrier_worker()
assert np.array(paddle.static.global_scope().find_var("total").get_tensor()) == num_workers * NUM_STEPS
stats = fleet_sparse.stats()["row_cache"]["counter"]
assert stats["hits"] > stats["reads"] / 3, stats
assert stats["held"] == 0, stats
assert mode != "sync" or most_lacked > 0, most_lacked
assert stats["left"] > 0, stats
for feed in batches(10):  # not a pass, whose end sends what is held
    exe.run(feed=feed, fetch_list=[])
    num_made[feed["ids"]] += 1
assert fleet_sparse.stats()["row_cache"]["counter"]["held"] > 0
if mode == "sync":
    fleet_sparse.save("model")  # by all workers, after the same step
else:
    Path(f"done{worker}").touch()
    while worker == 0 and not all(Path(f"done{each}").exists() for each in range(num_workers)):
        time.sleep(0.01)
    if worker == 0:
        fleet_sparse.save("model")
np.save(f"made{worker}", num_made)
fleet.barrier_worker()
fleet.stop_worker()
print("ended well")
