"""Trains until it is killed. Prints `step` after its first steps."""

import itertools

import numpy as np
import paddle
import paddle.distributed.fleet as fleet

import fleet_sparse

fleet_sparse.install()
paddle.enable_static()
fleet.init()
ids = paddle.static.data("ids", [None], "int64")
rows = paddle.static.nn.embedding(ids, size=[10**6, 8], is_sparse=True, is_distributed=True)
loss = paddle.mean(paddle.square(rows))
fleet.distributed_optimizer(paddle.optimizer.SGD(0.1)).minimize(loss)
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
exe = paddle.static.Executor(paddle.CPUPlace())
exe.run(paddle.static.default_startup_program())
fleet.init_worker()
for step in itertools.count():
    exe.run(feed={"ids": np.arange(100) + step}, fetch_list=[loss])
    if step % 50 == 0:
        print("step", step, flush=True)
