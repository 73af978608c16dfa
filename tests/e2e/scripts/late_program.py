"""Sync training of two programs, of which the second is built while the first one trains; worker 1 is slow."""

import time

import numpy as np
import paddle
import paddle.distributed.fleet as fleet

import fleet_sparse

fleet_sparse.install()
paddle.enable_static()
fleet.init()
exe = paddle.static.Executor(paddle.CPUPlace())


def program(table: str, *, is_dense: bool):
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, startup), paddle.utils.unique_name.guard(table):
        ids = paddle.static.data("ids", [None, 1], "int64")
        zero = paddle.ParamAttr(name=table, initializer=paddle.nn.initializer.Constant(0.0))
        rows = paddle.static.nn.embedding(ids, size=[10**6, 4], is_sparse=True, is_distributed=True, param_attr=zero)
        loss = paddle.mean(paddle.static.nn.fc(rows, 1) if is_dense else rows)
        strategy = fleet.DistributedStrategy()
        strategy.a_sync = False
        fleet.distributed_optimizer(paddle.optimizer.SGD(1.0), strategy).minimize(loss)
    exe.run(startup)
    return main, loss


def train(main, loss, num_steps: int) -> None:
    for _ in range(num_steps):
        if fleet.worker_index() == 1:
            time.sleep(0.02)
        (value,) = exe.run(main, feed={"ids": np.array([[3]])}, fetch_list=[loss])
    print(f"loss {float(value):.6f}", flush=True)


first = program("first", is_dense=False)
fleet.init_worker()
train(*first, 5)
second = program("second", is_dense=True)
train(*second, 5)
train(*first, 5)
fleet.stop_worker()
