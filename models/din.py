"""DIN: a user's history, pooled separately for each candidate item by how relevant each item of it is.

Zhou et al., Deep Interest Network for Click-Through Rate Prediction, KDD 2018, equation 3
(https://arxiv.org/abs/1706.06978):

    v_U(A) = sum_{j=1..H} a(e_j, v_A) e_j
    y      = sigmoid(MLP([v_U(A); v_A; x]))

with `e_j` the rows of the history, `v_A` that of the candidate, and `x` dense values, which the paper does not have.
The activation unit `a` is a perceptron of `[e_j; e_j - v_A; e_j * v_A; v_A]`, without a softmax, so that a long history
of one interest counts more than a short one. The layers use ReLU; the paper uses PReLU or Dice.
"""

from __future__ import annotations

from collections.abc import Sequence

import paddle

from .embedding import Embedding
from .perceptron import linear, perceptron

ACTIVATION_WIDTHS = (16,)
"""Widths of the activation unit's layers."""
PADDING_ID = 0
"""Id of the places of a history that is shorter than the others. It has a row of zeros, and so adds nothing."""


def din(
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
        ids: `(batch, num_fields)` int64: the candidate item, then the history, padded with `PADDING_ID`.
        dense: `(batch, num_dense)` float32.
        embedding: Looks up the rows; candidates and histories share one table.
        num_fields: H + 1.
        dim: Number of floats of a row.
        hidden: Widths of the last perceptron's layers.
    """
    length = num_fields - 1
    e = embedding(ids, name="din.item", dim=dim, bound=0.1, padding_id=PADDING_ID)  # (batch, H + 1, dim)
    candidate, history = paddle.split(e, [1, length], axis=1)
    repeated = paddle.expand(candidate, [-1, length, -1])
    unit = paddle.concat([history, history - repeated, history * repeated, repeated], axis=2)
    unit = perceptron(paddle.reshape(unit, [-1, 4 * dim]), ACTIVATION_WIDTHS, name="din.activation")
    weight = paddle.reshape(linear(unit, 1, name="din.activation.out"), [-1, length, 1])
    interest = paddle.sum(weight * history, axis=1)  # (batch, dim)
    a = perceptron(paddle.concat([interest, paddle.squeeze(candidate, 1), dense], axis=1), hidden, name="din")
    return linear(a, 1, name="din.out")
