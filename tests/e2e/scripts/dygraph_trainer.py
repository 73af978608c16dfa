"""A dygraph trainer that knows nothing of fleet, in the shape of PaddleRec's, with one line that names fleet_sparse."""

from __future__ import annotations

# isort: off
import fleet_sparse; fleet_sparse.nn.use_tables(save="tables")  # noqa: E702  # fmt: skip

import os  # noqa: E402
import sys  # noqa: E402

import numpy as np  # noqa: E402
import paddle  # noqa: E402


class Net(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = paddle.nn.Embedding(1000001, 9, sparse=True, weight_attr=paddle.ParamAttr(name="ids"))
        self.linear = paddle.nn.Linear(9, 2)

    def forward(self, fields: list[paddle.Tensor]) -> paddle.Tensor:
        return self.linear(sum(self.embedding(ids).reshape([-1, 9]) for ids in fields))


paddle.seed(1)
net = Net()
optimizer = paddle.optimizer.Adam(0.01, parameters=net.parameters())
random = np.random.RandomState(1)
for batch in range(20):
    optimizer.clear_grad()
    ids = random.randint(0, 100, (16, 2)) * 10007
    loss = paddle.nn.functional.cross_entropy(
        net([paddle.to_tensor(ids[:, :1]), paddle.to_tensor(ids[:, 1:])]), paddle.to_tensor(ids[:, :1] % 2)
    )
    loss.backward()
    optimizer.step()
    print(f"batch {batch} loss {float(loss):.4f}", flush=True)
    if batch == int(os.environ.get("FAILS_AFTER", "-1")):
        sys.exit(3)
paddle.save(net.state_dict(), "net.pdparams")
