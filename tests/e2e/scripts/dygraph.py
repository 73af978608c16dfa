"""Trains a dygraph model; every worker takes its part of each batch. MODE: sync, async, lag, geo or all_reduce.

With CALLS=each field each field is looked up by a call of its own. With ROW_LAG rows are cached, fewer than there are.
"""

from __future__ import annotations

import os

import numpy as np
import paddle
from paddle.distributed import fleet

import fleet_sparse

NUM_IDS, DIM, FIELDS, NUM_STEPS = 50, 4, 3, 50
WEIGHTS = np.random.RandomState(2).randn(FIELDS * DIM, 1).astype(np.float32) * 0.3

fleet_sparse.install()
mode = os.environ.get("MODE", "sync")
row_lag = int(os.environ.get("ROW_LAG", "0")) or None
strategy = fleet_sparse.PserverStrategy(
    max_step_lag=2 if mode == "lag" else None,
    dense="all_reduce" if mode == "all_reduce" else "pservers",
    max_row_lag=row_lag,
    row_cache=fleet_sparse.RowCache(max_rows=30, admit="all") if row_lag else None,
)
strategy.a_sync = mode in ("async", "lag", "geo")
if mode == "geo":
    strategy.a_sync_configs = {"k_steps": 3}
fleet.init(strategy=strategy)


def constant(name: str, value: float) -> paddle.ParamAttr:
    return paddle.ParamAttr(name=name, initializer=paddle.nn.initializer.Constant(value))


class Model(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = paddle.nn.Embedding(NUM_IDS, DIM, padding_idx=3, sparse=True, weight_attr=constant("emb", 0.1))
        # Worker 0's values are those of all.
        first = paddle.nn.initializer.Assign(WEIGHTS + (fleet.worker_index() if fleet.is_worker() else 0))
        attr = paddle.ParamAttr(name="dense_w", initializer=first)
        self.linear = paddle.nn.Linear(FIELDS * DIM, 1, weight_attr=attr, bias_attr=constant("dense_b", 0.0))

    def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
        if os.environ.get("CALLS") == "each field":
            rows = paddle.concat([self.embedding(ids[:, field : field + 1]) for field in range(FIELDS)], axis=1)
        else:
            rows = self.embedding(ids)
        return self.linear(paddle.reshape(rows, [-1, FIELDS * DIM]))


model = Model()
optimizer = paddle.optimizer.Adagrad(0.1, parameters=model.parameters())
optimizer = fleet.distributed_optimizer(optimizer)
model = fleet.distributed_model(model)
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()

fleet.init_worker()
index, num_workers = fleet.worker_index(), fleet.worker_num()
random = np.random.RandomState(7)
for _ in range(NUM_STEPS):
    ids = np.concatenate([np.arange(NUM_IDS), random.randint(0, NUM_IDS, 22)]).reshape(-1, FIELDS)
    labels = (ids.sum(1, keepdims=True) % 2).astype(np.float32)
    ids, labels = paddle.to_tensor(ids[index::num_workers]), paddle.to_tensor(labels[index::num_workers])
    loss = paddle.nn.functional.binary_cross_entropy_with_logits(model(ids), labels)
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    print(f"loss {float(loss):.8f}", flush=True)
fleet.barrier_worker()
with paddle.no_grad():
    print(f"total {float(model(paddle.arange(48).reshape([-1, FIELDS])).sum()):.8f}", flush=True)
if index == 0:
    fleet.save_persistables(None, "model")
fleet.barrier_worker()
fleet.stop_worker()
print("worker done", flush=True)
