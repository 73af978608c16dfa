"""A deep neural network over embedded fields, trained in dygraph: the example of docs/dygraph.md.

The equation is that of `dnn.py`, `p = sigmoid(MLP([e_1, ..., e_F]))`. Run it alone, or on pservers:
`fleetrun --server_num 2 --worker_num 2 -m fleet_sparse.models.dygraph_dnn`.
"""

from __future__ import annotations

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle.distributed import fleet

import fleet_sparse

NUM_IDS, DIM, NUM_FIELDS, HIDDEN = 10**11, 8, 4, 32
BATCH, NUM_STEPS, VOCABULARY = 64, 200, 200


class DNN(paddle.nn.Layer):  # type: ignore[misc]  # Paddle's classes are untyped here
    """The network; `(batch, NUM_FIELDS)` ids to `(batch, 1)` logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = fleet_sparse.nn.Embedding(NUM_IDS, DIM, weight_attr=paddle.ParamAttr(name="ids"))
        self.layers = paddle.nn.Sequential(
            paddle.nn.Linear(NUM_FIELDS * DIM, HIDDEN), paddle.nn.ReLU(), paddle.nn.Linear(HIDDEN, 1)
        )

    def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
        """Returns the logits."""
        return self.layers(paddle.flatten(self.embedding(ids), 1))


def batch(random: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Ids, and labels that the id of the first field decides."""
    ids = random.integers(0, VOCABULARY, (BATCH, NUM_FIELDS))
    return ids * 982451653, (ids[:, :1] % 2).astype(np.float32)


def main() -> None:
    """Trains and saves."""
    fleet_sparse.install()
    fleet.init()
    model = DNN()
    optimizer = paddle.optimizer.Adam(0.01, lazy_mode=True, parameters=model.parameters())
    optimizer = fleet.distributed_optimizer(optimizer, fleet_sparse.PserverStrategy())
    model = fleet.distributed_model(model)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
    fleet.init_worker()
    random = np.random.default_rng(fleet.worker_index())
    for step in range(NUM_STEPS):
        ids, labels = map(paddle.to_tensor, batch(random))
        loss = paddle.nn.functional.binary_cross_entropy_with_logits(model(ids), labels)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        if step % 50 == 0 or step == NUM_STEPS - 1:
            print(f"step {step} loss {float(loss):.4f}", flush=True)
    fleet.save_persistables(None, "dygraph_dnn")
    fleet.stop_worker()


if __name__ == "__main__":
    main()
