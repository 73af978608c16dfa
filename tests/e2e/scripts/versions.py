"""Trains and saves a model, then a delta after each further round; writes what each version predicts for all ids."""

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
from program import linear, minimize, start, table

import fleet_sparse

ids = paddle.static.data("ids", [None, 4], "int64")
prediction = linear(paddle.sum(table(ids, "items", None), axis=1), "w", 0.3)
loss = paddle.mean(paddle.square(prediction - 1.0))
minimize(loss, paddle.optimizer.Adam(0.05))
exe = start()
rng = np.random.default_rng(0)
known = np.append(np.arange(41), [-1, -(2**63), 2**63 - 1])
evaluation = paddle.static.default_main_program().clone(for_test=True)
for number in range(1, 5):
    exe.run(feed={"ids": rng.choice(known[: 11 * number], (8, 4))}, fetch_list=[loss])
    feed = {"ids": known.reshape(-1, 4)}
    (predicted,) = exe.run(evaluation, feed=feed, fetch_list=[prediction])
    np.savez(f"truth-{number}.npz", prediction=predicted, **feed)
    if number == 1:
        fleet.save_inference_model(exe, "serve", ["ids"], [prediction])
    else:
        fleet_sparse.save("serve/rows", "delta")
fleet.stop_worker()
