"""Sync training on two fields of variable length, ragged in one table and padded in another one.

Prints for every step the loss and the largest difference of the pooled rows of the two tables.
"""

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
from program import minimize, start

import fleet_sparse

NAMES, PADDING = ("tags", "words"), 0
TABLE = {"size": [10**9, 4], "is_sparse": True, "is_distributed": True}


def pooled(kind, shape, **arguments):
    ids = [paddle.static.data(f"{kind}.{name}", shape, "int64") for name in NAMES]
    initializer = paddle.nn.initializer.Constant(0.1)
    attr = paddle.ParamAttr(name=kind, initializer=initializer)
    return paddle.concat(fleet_sparse.pooled_embedding(ids, combiner="mean", param_attr=attr, **arguments, **TABLE), 1)


lengths = [paddle.static.data(f"{name}.lengths", [None], "int64") for name in NAMES]
ragged = pooled("ragged", [None], lengths=lengths)
padded = pooled("padded", [None, None], padding_idx=PADDING)
label = paddle.static.data("label", [None, 1], "float32")
loss = sum(
    paddle.nn.functional.binary_cross_entropy_with_logits(paddle.sum(rows, 1, keepdim=True), label)
    for rows in (ragged, padded)
)
minimize(loss, paddle.optimizer.Adagrad(0.1), fleet_sparse.PserverStrategy(examples_input="label"))
exe = start()


def batches():
    rng = np.random.default_rng(fleet.worker_index())
    for _ in range(30):
        size = int(rng.integers(3, 9))
        feed = {"label": rng.integers(0, 2, (size, 1)).astype(np.float32)}
        for name in NAMES:
            sizes = rng.integers(0, 5, size)
            values = rng.integers(1, 20, (size, 5)) * 2 + feed["label"].astype(np.int64)
            is_inside = np.arange(5) < sizes[:, None]
            feed |= {f"ragged.{name}": values[is_inside], f"{name}.lengths": sizes}
            feed[f"padded.{name}"] = np.where(is_inside, values, PADDING)
        yield feed


for feed in fleet_sparse.look_ahead(batches()):
    value, left, right = exe.run(feed=feed, fetch_list=[loss, ragged, padded])
    print(f"loss {float(value):.6f} difference {np.abs(left - right).max():.9f}", flush=True)
fleet.stop_worker()
