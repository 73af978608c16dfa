"""Wide & Deep: the sum of a linear model, which memorises, and a deep one, which generalises.

Cheng et al., Wide & Deep Learning for Recommender Systems, DLRS 2016, equation 3 (https://arxiv.org/abs/1606.07792):

    P(Y = 1 | x) = sigmoid(w_wide^T [x, phi(x)] + w_deep^T a^(lf) + b)
    a^(l+1)      = relu(W^(l) a^(l) + b^(l))

`phi`, the crossed features, are ids like the others: the data reader makes the crosses. Both sides use all fields and
the dense values. One optimizer trains both; the paper uses FTRL for the wide side.
"""

from __future__ import annotations

from collections.abc import Sequence

import paddle

from .embedding import Embedding
from .perceptron import linear, perceptron


def wide_deep(
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
        num_fields: Number of fields.
        dim: Number of floats of a row on the deep side; a row of the wide side is its weight alone.
        hidden: Widths of the deep side's layers.
    """
    w_wide = embedding(ids, name="wide_deep.w", dim=1, bound=0.0)  # (batch, num_fields, 1)
    wide = paddle.sum(w_wide, axis=1)
    wide += linear(dense, 1, name="wide_deep.wide", has_bias=False)

    e = embedding(ids, name="wide_deep.e", dim=dim, bound=0.01)  # (batch, num_fields, dim)
    a = paddle.concat([paddle.reshape(e, [-1, num_fields * dim]), dense], axis=1)
    a = perceptron(a, hidden, name="wide_deep")
    deep = linear(a, 1, name="wide_deep.out")  # its bias is b
    return wide + deep
