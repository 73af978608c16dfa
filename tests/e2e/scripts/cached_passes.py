"""Sync workers that cache rows and make three passes of other lengths.

In each step every worker adds 1 to its value of the rows that it looks up and to a dense parameter, and checks both.
SIZES is the number of batches of each worker in a pass, as `10,13`; with MEET they meet at a barrier after each pass.
DENSE is the strategy's `dense`. SAVE_EVERY is the interval of saves in steps; SAVE_ALONE the step after which worker 0
saves and no other worker does. `made0.npy` has the numbers of updates of each row by worker 0 after each of its steps.
"""

import os

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
from program import minimize, start, table

import fleet_sparse

NUM_IDS, NUM_PASSES = 30, 3
worker, sizes = fleet.worker_index(), [int(size) for size in os.environ["SIZES"].split(",")]
strategy = fleet_sparse.PserverStrategy(
    dense=os.environ["DENSE"], max_row_lag=400, max_row_lag_share=None, row_cache=fleet_sparse.RowCache(admit="all")
)
rows = table(paddle.static.data("ids", [None], "int64"), "counter", dim=2)
evaluation = paddle.static.default_main_program().clone(for_test=True)
own = paddle.static.data("own", [2, 1], "float32")
total = paddle.static.create_parameter([1], "float32", "total", default_initializer=paddle.nn.initializer.Constant(0.0))
dense = paddle.sum(total)
loss = paddle.sum(paddle.matmul(rows, own)) - dense
minimize(loss, paddle.optimizer.SGD(1.0), strategy, scale="sum")
if "SAVE_EVERY" in os.environ:
    fleet_sparse.save_every("model", steps=int(os.environ["SAVE_EVERY"]), keep_last=None)
exe = start()
column = np.zeros((2, 1), np.float32)
column[worker] = -1
rng = np.random.default_rng(worker)
alone, meets = int(os.environ.get("SAVE_ALONE", "0")), "MEET" in os.environ


def batches():
    for _ in range(sizes[worker]):
        yield {"ids": rng.choice(NUM_IDS, 12, replace=False), "own": column}


made = [np.zeros(NUM_IDS, np.int64)]
num_steps = [NUM_PASSES * size for size in sizes]
for number in range(NUM_PASSES):
    for batch, feed in enumerate(fleet_sparse.look_ahead(batches())):
        step, other = len(made) - 1, sizes[1 - worker]
        seen, found = exe.run(feed=feed, fetch_list=[rows, dense])
        np.testing.assert_array_equal(seen[:, worker], made[-1][feed["ids"]])
        is_behind = alone and worker == 0 and step >= alone  # the other trained a step more, while this one sent
        of_other = number * other + min(batch, other) if meets else min(step + bool(is_behind), num_steps[1 - worker])
        assert found == step + of_other or (alone and worker == 1), found
        made.append(made[-1].copy())
        made[-1][feed["ids"]] += 1
        if worker == 0 and step + 1 == alone:
            fleet_sparse.save("model")
    if meets:
        fleet.barrier_worker()
np.save(f"made{worker}", made)
fleet.barrier_worker()
assert fleet_sparse.stats()["row_cache"]["counter"]["held"] == 0
both = np.stack([np.load(f"made{each}.npy")[-1] for each in range(2)], axis=1)
np.testing.assert_array_equal(exe.run(evaluation, feed={"ids": np.arange(NUM_IDS)}, fetch_list=[rows])[0], both)
assert np.array(paddle.static.global_scope().find_var("total").get_tensor()) == sum(num_steps)
fleet.stop_worker()
print("ended well")
