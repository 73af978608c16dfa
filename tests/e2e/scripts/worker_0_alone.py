"""A job whose worker 0 loads alone, whose workers meet before they are connected, and that reduces without Gloo."""

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
import program  # installs the plugin and initialises fleet

import fleet_sparse

fleet.barrier_worker()  # before init_worker
embedding = paddle.nn.Embedding(60, 4, sparse=True)
rows = embedding(paddle.static.data("item", [None, 4], "int64"))
loss = paddle.mean(paddle.square(program.linear(paddle.sum(rows, axis=1), "w", 0.3) - 1.0))
program.minimize(loss, paddle.optimizer.Adam(0.05))
exe = program.start()


def train(what, seed):
    rng = np.random.default_rng([seed, fleet.worker_index()])
    for _ in range(5):
        print(what, float(exe.run(feed={"item": rng.integers(0, 60, (8, 4))}, fetch_list=[loss])[0]).hex(), flush=True)


train("before", 0)
fleet.barrier_worker()
print("rows", sum(pserver["rows"] for pserver in fleet_sparse.stats()["pservers"]))
if fleet.is_first_worker():
    fleet.save_persistables(exe, "model", paddle.static.default_main_program(), mode=0)
fleet.barrier_worker()
train("after", 1)
fleet.barrier_worker()
if fleet.is_first_worker():
    fleet.load_model("model", 0)
fleet.barrier_worker()
train("after", 1)

mine = fleet.worker_index() + 1
print("sum", fleet.util.all_reduce(np.array([[mine, 10 * mine]])).tolist())
print("max", fleet.util.all_reduce([mine], "max").tolist())
print("large", fleet.util.all_reduce(np.full(9_000_000, mine)).sum())
print("gathered", fleet.util.all_gather(mine))
print("metric", float(fleet.metrics.sum(np.array([float(mine)]))[0]))
fleet.util.barrier()
try:
    fleet.util.all_reduce([1], comm_world="all")
except fleet_sparse.PlanError as error:
    print("refused:", error)
fleet.stop_worker()
