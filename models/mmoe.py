"""MMoE: tasks share experts, and a gate of each task chooses among them.

Ma et al., Modeling Task Relationships in Multi-task Learning with Multi-gate Mixture-of-Experts, KDD 2018, equations 6
and 7 (https://dl.acm.org/doi/10.1145/3219819.3220007):

    f^k(x) = sum_i g^k(x)_i f_i(x)
    g^k(x) = softmax(W_{gk} x)
    y_k    = sigmoid(h^k(f^k(x)))

with `x` the rows of all fields and the dense values, `f_i` the experts, and `h^k` the tower of task k.
"""

from __future__ import annotations

from collections.abc import Sequence

import paddle

from .embedding import Embedding
from .perceptron import linear, perceptron

NUM_TASKS = 2
NUM_EXPERTS = 4


def mmoe(
    ids: paddle.pir.Value,
    dense: paddle.pir.Value,
    *,
    embedding: Embedding,
    num_fields: int,
    dim: int,
    hidden: Sequence[int],
) -> paddle.pir.Value:
    """Builds the network; returns logits of the tasks, `(batch, NUM_TASKS)` float32.

    Args:
        ids: `(batch, num_fields)` int64, one id per field.
        dense: `(batch, num_dense)` float32.
        embedding: Looks up the rows.
        num_fields: Number of fields.
        dim: Number of floats of a row.
        hidden: Widths: the first ones of each expert, the last one of each tower.
    """
    *of_experts, of_towers = hidden
    e = embedding(ids, name="mmoe.e", dim=dim, bound=0.01)  # (batch, num_fields, dim)
    x = paddle.concat([paddle.reshape(e, [-1, num_fields * dim]), dense], axis=1)
    experts = [perceptron(x, of_experts, name=f"mmoe.expert.{i}") for i in range(NUM_EXPERTS)]
    stacked = paddle.stack(experts, axis=1)  # (batch, NUM_EXPERTS, width)
    logits = []
    for task in range(NUM_TASKS):
        gate = paddle.nn.functional.softmax(linear(x, NUM_EXPERTS, name=f"mmoe.gate.{task}", has_bias=False))
        mixed = paddle.sum(paddle.unsqueeze(gate, 2) * stacked, axis=1)
        tower = perceptron(mixed, [of_towers], name=f"mmoe.tower.{task}")
        logits.append(linear(tower, 1, name=f"mmoe.tower.{task}.out"))
    return paddle.concat(logits, axis=1)
