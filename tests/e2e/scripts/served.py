"""Trains on all workers and saves a model; worker 0 writes what it reads then, a step later, and after loading."""

import sys

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
from program import linear, minimize, start, table

ids = paddle.static.data("ids", [None, 4], "int64")
rows = table(ids, "items", None)
prediction = linear(paddle.sum(rows, axis=1) + paddle.square(paddle.sum(rows, axis=1)), "w", 0.3)
loss = paddle.mean(paddle.square(prediction - 1.0))
minimize(loss, paddle.optimizer.Adam(0.05))
exe = start()
rng = np.random.default_rng(fleet.worker_index())
known = np.append(np.arange(40), [-1, -(2**63), 2**63 - 1])
exe.run(feed={"ids": np.resize(known, (11, 4))}, fetch_list=[loss])
for _ in range(4):
    exe.run(feed={"ids": rng.choice(known, (8, 4))}, fetch_list=[loss])
fleet.barrier_worker()
fleet.save_inference_model(exe, "serve", ["ids"], [prediction])
evaluation = paddle.static.default_main_program().clone(for_test=True)
feed = {"ids": np.random.default_rng(9).choice(known, (64, 4))}
read = {"ids": feed["ids"]}


def evaluate(suffix=""):
    fleet.barrier_worker()
    values = exe.run(evaluation, feed=feed, fetch_list=[prediction, rows, "w"])
    read.update({name + suffix: value for name, value in zip(("prediction", "rows", "w"), values, strict=True)})
    fleet.barrier_worker()


evaluate()
exe.run(feed={"ids": rng.choice(known, (8, 4))}, fetch_list=[loss])
evaluate("_later")
fleet.load_inference_model("serve", 0)
evaluate("_loaded")
if fleet.is_first_worker():
    np.savez("expected.npz", **read)
fleet.stop_worker()
sys.stdout.flush()
