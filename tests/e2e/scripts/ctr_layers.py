"""Trains `continuous_value_model` and `data_norm` in sync, and compares sums with what all workers fed."""

import sys

import numpy as np
import paddle
import paddle.distributed.fleet as fleet

import fleet_sparse

fleet_sparse.install()
NUM_STEPS, NUM_IDS, DECAY, EPSILON = 10, 5, 0.5, 1e-5


def batch_of(worker, step):
    rng = np.random.default_rng([worker, step])
    return {
        "ids": rng.integers(0, NUM_IDS, (4, 2)),
        "show_click": np.stack([np.ones(4), rng.integers(0, 2, 4)], axis=1).astype(np.float32),
        "values": rng.integers(-2, 3, (4, 3)).astype(np.float32),
    }


paddle.enable_static()
fleet.init()
ids = paddle.static.data("ids", [-1, 2], "int64")
show_click = paddle.static.data("show_click", [-1, 2], "float32")
values = paddle.static.data("values", [-1, 3], "float32")
rows = paddle.static.nn.sparse_embedding(ids, [NUM_IDS, 6], param_attr=paddle.ParamAttr(name="T"))
clicks = paddle.static.nn.continuous_value_model(paddle.sum(rows, axis=1), show_click)
normed = paddle.static.nn.data_norm(values, name="n", summary_decay_rate=DECAY)
loss = paddle.mean(paddle.square(paddle.nn.Linear(9, 1)(paddle.concat([clicks, normed], axis=1))))
strategy = fleet_sparse.PserverStrategy()
strategy.a_sync = False
clip = paddle.nn.ClipGradByGlobalNorm(1.0)
fleet.distributed_optimizer(paddle.optimizer.Adagrad(0.01, grad_clip=clip), strategy).minimize(loss)
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
    sys.exit()
executor = paddle.static.Executor()
executor.run(paddle.static.default_startup_program())
fleet.init_worker()
counts, sums = np.zeros((NUM_IDS, 2)), [np.full(3, 1e4), np.zeros(3)]
for step in range(NUM_STEPS):
    executor.run(feed=batch_of(fleet.worker_index(), step))
    batches = [batch_of(worker, step) for worker in range(fleet.worker_num())]
    for each in batches:
        for place in range(2):
            np.add.at(counts, each["ids"][:, place], each["show_click"])
    added = [sum(len(each["values"]) for each in batches), sum(each["values"].sum(axis=0) for each in batches)]
    sums = [DECAY * old + new for old, new in zip(sums, added, strict=True)]
fleet.barrier_worker()
test = paddle.static.default_main_program().clone(for_test=True)
feed = {**batch_of(0, 0), "ids": np.array([[0, 1], [2, 3], [4, 4], [0, 0]])}
(got,) = executor.run(test, feed=feed, fetch_list=[rows])
print("counts", float(np.abs(got.reshape(-1, 6)[:5, :2] - counts).max()))
scope = paddle.static.global_scope()
for name, expected in zip(["n.batch_size", "n.batch_sum"], sums, strict=True):
    print("sums", float(np.abs(np.asarray(scope.find_var(name).get_tensor()) - expected).max()))
fleet.stop_worker()
