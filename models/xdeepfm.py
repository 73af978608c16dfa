"""xDeepFM: a compressed interaction network over whole rows, a linear model and a deep network.

Lian et al., xDeepFM: Combining Explicit and Implicit Feature Interactions for Recommender Systems, KDD 2018,
equations 6, 8 and 9 (https://arxiv.org/abs/1803.05170):

    X^0          = (e_1, e_2, ..., e_m)                   the rows of the fields, m x D
    X^k_{h}      = sum_{i, j} W^{k,h}_{ij} X^{k-1}_{i} * X^0_{j}     `*` multiplies element by element
    p^k_h        = sum_d X^k_{h,d}
    y            = sigmoid(w_linear^T x + w_deep^T MLP(X^0) + w_cin^T [p^1; ...; p^T] + b)

A dense value is a field too: its row is the value times a vector of its own, as in `deepfm`.
"""

from __future__ import annotations

from collections.abc import Sequence

import paddle
from paddle import ParamAttr
from paddle.nn.initializer import Uniform, XavierUniform

from .embedding import Embedding
from .perceptron import linear, perceptron

NUM_FEATURE_MAPS = (16, 16)
"""H_k, the number of rows of `X^k`, of each layer of the compressed interaction network."""


def xdeepfm(
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
        dense: `(batch, num_dense)` float32, `num_dense` known.
        embedding: Looks up the rows.
        num_fields: Number of categorical fields; m is this and `num_dense` together.
        dim: D, number of floats of a row `e_i`.
        hidden: Widths of the deep network's layers.
    """
    num_dense = dense.shape[1]
    num_rows = num_fields + num_dense
    w = embedding(ids, name="xdeepfm.w", dim=1, bound=0.0)  # (batch, num_fields, 1)
    y = paddle.sum(w, axis=1) + linear(dense, 1, name="xdeepfm.dense_w", has_bias=False)

    e = embedding(ids, name="xdeepfm.e", dim=dim, bound=0.01)  # (batch, num_fields, D)
    dense_e = paddle.static.create_parameter(
        [num_dense, dim], "float32", attr=ParamAttr(name="xdeepfm.dense_e", initializer=Uniform(-0.01, 0.01))
    )
    x_0 = paddle.concat([e, paddle.unsqueeze(dense, 2) * dense_e], axis=1)  # (batch, m, D)

    x, num_maps, pooled = x_0, num_rows, []
    for layer, width in enumerate(NUM_FEATURE_MAPS):
        pairs = paddle.unsqueeze(x, 2) * paddle.unsqueeze(x_0, 1)  # (batch, H_{k-1}, m, D)
        pairs = paddle.reshape(pairs, [-1, num_maps * num_rows, dim])
        weight = paddle.static.create_parameter(
            [width, num_maps * num_rows],
            "float32",
            attr=ParamAttr(name=f"xdeepfm.cin.{layer}", initializer=XavierUniform()),
        )
        x, num_maps = paddle.matmul(weight, pairs), width  # (batch, H_k, D)
        pooled.append(paddle.sum(x, axis=2))
    y += linear(paddle.concat(pooled, axis=1), 1, name="xdeepfm.cin.out", has_bias=False)

    a = perceptron(paddle.reshape(x_0, [-1, num_rows * dim]), hidden, name="xdeepfm")
    return y + linear(a, 1, name="xdeepfm.out")  # its bias is b
