"""Trains and saves a model, then a delta of it after each further round; writes what each version has for all ids."""

from pathlib import Path

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
from program import linear, minimize, start, table

ids = paddle.static.data("ids", [None, 4], "int64")
rows = table(ids, "items", None)
prediction = linear(paddle.sum(rows, axis=1), "w", 0.3)
loss = paddle.mean(paddle.square(prediction - 1.0))
minimize(loss, paddle.optimizer.Adam(0.05))
exe = start()
rng = np.random.default_rng(0)
known = np.append(np.arange(41), [-1, -(2**63), 2**63 - 1])
evaluation = paddle.static.default_main_program().clone(for_test=True)
for number in range(1, 5):
    exe.run(feed={"ids": rng.choice(known[: 11 * number], (8, 4))}, fetch_list=[loss])
    (found, dense, predicted) = exe.run(
        evaluation, feed={"ids": known.reshape(-1, 4)}, fetch_list=[rows, "w", prediction]
    )
    rows_of_ids = found.reshape(len(known), -1)
    np.savez(f"truth-{number}.npz", ids=known, rows=rows_of_ids, dense=dense, prediction=predicted)
    fleet.save_inference_model(exe, "serve", ["ids"], [prediction], mode=0 if number == 1 else 1)
    print(f"saved {number}", flush=True)
    Path("go").read_text()  # a pipe: the test has read this version
fleet.stop_worker()
