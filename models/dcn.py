"""DCN: cross layers with a weight vector each, whose outputs are polynomials of the inputs, beside a deep network.

Wang et al., Deep & Cross Network for Ad Click Predictions, ADKDD 2017, equations 1 to 5
(https://arxiv.org/abs/1708.05123):

    x_0     = [e_1; e_2; ...; e_m; x]          e_i the row of field i, x the dense values
    x_{l+1} = x_0 (x_l^T w_l) + b_l + x_l
    y       = sigmoid(w^T [x_L; MLP(x_0)])
"""

from __future__ import annotations

from collections.abc import Sequence

import paddle
from paddle import ParamAttr
from paddle.nn.initializer import Constant

from .embedding import Embedding
from .perceptron import linear, perceptron

NUM_CROSS_LAYERS = 3


def dcn(
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
        num_fields: m.
        dim: Number of floats of a row `e_i`.
        hidden: Widths of the deep network's layers.
    """
    width = num_fields * dim + dense.shape[1]
    e = embedding(ids, name="dcn.e", dim=dim, bound=0.01)  # (batch, m, dim)
    x_0 = paddle.concat([paddle.reshape(e, [-1, num_fields * dim]), dense], axis=1)
    x = x_0
    for layer in range(NUM_CROSS_LAYERS):
        bias = ParamAttr(name=f"dcn.cross.{layer}.bias", initializer=Constant(0.0))
        b = paddle.static.create_parameter([width], "float32", attr=bias, is_bias=True)
        x = x_0 * linear(x, 1, name=f"dcn.cross.{layer}", has_bias=False) + b + x
    deep = perceptron(x_0, hidden, name="dcn")
    return linear(paddle.concat([x, deep], axis=1), 1, name="dcn.out")
