"""Sync training of a small model. Prints every loss, bit by bit, and the number of requests of the pservers.

LOOK_AHEAD is 1 to look ahead. STEPS is how many batches each worker has, as `10,7`; then they wait for each other, and
have as many once more.
"""

import os

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
from program import linear, minimize, start, table

import fleet_sparse

item = paddle.static.data("item", [None, 4], "int64")
user = paddle.static.data("user", [None, 1], "int64")
label = paddle.static.data("label", [None, 1], "float32")
rows = [
    paddle.sum(table(item, "items", None), axis=1),
    table(paddle.reshape(user, [-1]), "users", None),
    table(paddle.reshape(user * 3 % 17, [-1]), "groups", None),
]
logit = linear(paddle.concat(rows, axis=1), "w", 0.3)
loss = paddle.nn.functional.binary_cross_entropy_with_logits(logit, label)
minimize(loss, paddle.optimizer.Adagrad(0.1))
exe = start()
rng = np.random.default_rng(fleet.worker_index())


def batches():
    for _ in range(int(os.environ["STEPS"].split(",")[fleet.worker_index()])):
        # Few ids, so that the other worker's step changes many of the rows that were pulled early.
        yield {
            "item": rng.integers(0, 60, (8, 4)),
            "user": rng.integers(0, 30, (8, 1)),
            "label": rng.integers(0, 2, (8, 1)).astype(np.float32),
        }


for _ in range(2):
    loader = batches() if os.environ["LOOK_AHEAD"] == "0" else fleet_sparse.look_ahead(batches())
    for feed in loader:
        print("loss", float(exe.run(feed=feed, fetch_list=[loss])[0]).hex(), flush=True)
    fleet.barrier_worker()
print("requests", sum(pserver["requests"] for pserver in fleet_sparse.stats()["pservers"]))
fleet.stop_worker()
