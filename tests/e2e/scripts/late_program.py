"""Sync training of two programs, of which the second is built while the first one trains; worker 1 is slow."""

import time

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
from program import minimize, table

exe = paddle.static.Executor(paddle.CPUPlace())


def program(name: str, *, is_dense: bool):
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, startup), paddle.utils.unique_name.guard(name):
        rows = table(paddle.static.data("ids", [None, 1], "int64"), name)
        loss = paddle.mean(paddle.static.nn.fc(rows, 1) if is_dense else rows)
        minimize(loss, paddle.optimizer.SGD(1.0))
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
