"""Two async workers that cache rows, as in `cached.py`, of which worker 1 is killed while it holds updates.

Worker 0 waits for that and prints how many rows lack updates of worker 1, which writes before how many rows hold some,
and checks that no other update is missing.
"""

import os
import signal
import time
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
from program import minimize, start, table

import fleet_sparse
from fleet_sparse.plugin.active_session import active

NUM_IDS, NUM_STEPS, LAG = 60, 40, 40
cache = fleet_sparse.RowCache(max_rows=40, admit="all")
worker, made = fleet.worker_index(), Path("made1.npy")
rows = table(paddle.static.data("ids", [None], "int64"), "counter", dim=2)
evaluation = paddle.static.default_main_program().clone(for_test=True)
own = paddle.static.data("own", [2, 1], "float32")
loss = paddle.sum(paddle.matmul(rows, own))
strategy = fleet_sparse.PserverStrategy(max_row_lag=LAG, row_cache=cache)
minimize(loss, paddle.optimizer.SGD(1.0), strategy, is_sync=False)
exe = start()
rng, num_made, column = np.random.default_rng(worker), np.zeros(NUM_IDS), np.zeros((2, 1), np.float32)
column[worker] = -1
for _ in range(NUM_STEPS):
    ids = rng.choice(NUM_IDS, 12, replace=False)
    exe.run(feed={"ids": ids, "own": column}, fetch_list=[])
    num_made[ids] += 1
active().connection("e2e").client.flush()
num_held = fleet_sparse.stats()["row_cache"]["counter"]["held"]
if worker == 1:
    Path("held").write_text(str(num_held))
    np.save("made1.part", num_made)
    Path("made1.part.npy").rename(made)
    os.kill(os.getpid(), signal.SIGKILL)
while not made.exists():
    time.sleep(0.005)
(found,) = exe.run(evaluation, feed={"ids": np.arange(NUM_IDS)}, fetch_list=[rows])
np.testing.assert_array_equal(found[:, 0], num_made)
lost = np.load(made) - found[:, 1]
assert lost.min() >= 0, lost
assert lost.max() <= LAG / 2, lost
assert np.count_nonzero(lost) == int(Path("held").read_text()) > 0, lost
print("ended well", flush=True)
os._exit(0)  # a barrier would wait for the other worker
