"""Worker 0 trains, then both evaluate; twice. Prints the result of each evaluation."""

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
from program import linear, minimize, start, table


def network():
    rows = table(paddle.static.data("ids", [None], "int64"), "emb", None)
    return paddle.mean(linear(rows + 1.0, "w", 0.5, bias_attr=False))


loss = network()
evaluation = paddle.static.Program()
with paddle.static.program_guard(evaluation, paddle.static.Program()):
    result = network()
minimize(loss, paddle.optimizer.SGD(0.1), is_sync=False)
exe = start()
for _ in range(2):
    if fleet.is_first_worker():
        for _ in range(5):
            exe.run(feed={"ids": np.arange(10)}, fetch_list=[loss])
    fleet.barrier_worker()
    (value,) = exe.run(evaluation, feed={"ids": np.arange(10)}, fetch_list=[result])
    print(f"evaluated {float(value):.9f}", flush=True)
    fleet.barrier_worker()
fleet.stop_worker()
