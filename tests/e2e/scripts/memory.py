"""Trains a table of SIZE ids for a few steps; prints the peak memory of the process."""

import os
import resource

import numpy as np
import paddle
import paddle.distributed.fleet as fleet

import fleet_sparse

fleet_sparse.install()
paddle.enable_static()
fleet.init()
ids = paddle.static.data("ids", [None], "int64")
rows = paddle.static.nn.embedding(ids, size=[int(os.environ["SIZE"]), 16], is_sparse=True, is_distributed=True)
loss = paddle.mean(rows)
fleet.distributed_optimizer(paddle.optimizer.Adam(0.1, lazy_mode=True)).minimize(loss)
exe = paddle.static.Executor(paddle.CPUPlace())
exe.run(paddle.static.default_startup_program())
fleet.init_worker()
for _ in range(5):
    exe.run(feed={"ids": np.arange(10)}, fetch_list=[loss])
fleet.stop_worker()
print("peak MB", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, flush=True)
