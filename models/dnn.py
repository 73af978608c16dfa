"""Embedding and multi-layer perceptron: the base model of click prediction.

Zhou et al., Deep Interest Network for Click-Through Rate Prediction, KDD 2018, section 4.2
(https://arxiv.org/abs/1706.06978):

    e_i = W_i t_i                        the row of field i
    r   = [e_1; e_2; ...; e_m]
    y   = sigmoid(MLP([r; x]))

with `t_i` one-hot and `x` the dense values, which the paper does not have. The layers use ReLU; the paper uses PReLU or
Dice.
"""

from __future__ import annotations

from collections.abc import Sequence

import paddle

from .embedding import Embedding
from .perceptron import linear, perceptron


def dnn(
    ids: paddle.pir.Value,
    dense: paddle.pir.Value,
    *,
    embedding: Embedding,
    num_fields: int,
    dim: int,
    hidden: Sequence[int],
) -> paddle.pir.Value:
    """Builds the network; returns logits of a click, `(batch, 1)` float32.

    Args:
        ids: `(batch, num_fields)` int64, one id per field.
        dense: `(batch, num_dense)` float32.
        embedding: Looks up the rows.
        num_fields: m.
        dim: Number of floats of a row `e_i`.
        hidden: Widths of the perceptron's layers.
    """
    e = embedding(ids, name="dnn.e", dim=dim, bound=0.01)  # (batch, m, dim)
    a = paddle.concat([paddle.reshape(e, [-1, num_fields * dim]), dense], axis=1)
    a = perceptron(a, hidden, name="dnn")
    return linear(a, 1, name="dnn.out")
