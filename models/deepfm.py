"""DeepFM: a factorisation machine and a deep network over the same rows.

Guo et al., DeepFM: A Factorization-Machine based Neural Network for CTR Prediction, IJCAI 2017, equations 1 to 4
(https://arxiv.org/abs/1703.04247):

    y     = sigmoid(y_FM + y_DNN)
    y_FM  = <w, x> + sum_{i < j} <V_i, V_j> x_i x_j
    a^(0) = [e_1, e_2, ..., e_m]         e_i = V_i x_i, the row of field i
    y_DNN = W a^(H) + b

A categorical field has `x_i = 1` and its own `w_i` and `V_i` for each id, from two tables; a dense value is a field
with `x_i` the value and one `w_i` and `V_i`. The sum over pairs is Rendle's
`1/2 (|sum_i e_i|^2 - sum_i |e_i|^2)` (Factorization Machines, ICDM 2010, lemma 3.1).
"""

from __future__ import annotations

from collections.abc import Sequence

import paddle
from paddle import ParamAttr
from paddle.nn.initializer import Uniform

from .embedding import Embedding
from .perceptron import linear, perceptron


def deepfm(
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
        dim: k, number of floats of a row `V_i`.
        hidden: Widths of the deep network's layers.
    """
    num_dense = dense.shape[1]
    first_values = Uniform(-0.01, 0.01)

    w = embedding(ids, name="deepfm.w", dim=1, bound=0.0)  # (batch, num_fields, 1)
    order_1 = paddle.sum(w, axis=1)
    order_1 += paddle.static.nn.fc(dense, 1, weight_attr=ParamAttr(name="deepfm.dense_w"), bias_attr=False)

    v = embedding(ids, name="deepfm.v", dim=dim, bound=0.01)  # (batch, num_fields, k)
    dense_v = paddle.static.create_parameter(
        [num_dense, dim], "float32", attr=ParamAttr(name="deepfm.dense_v", initializer=first_values)
    )
    e = paddle.concat([v, paddle.unsqueeze(dense, 2) * dense_v], axis=1)  # (batch, m, k)
    square_of_sum = paddle.square(paddle.sum(e, axis=1))
    sum_of_squares = paddle.sum(paddle.square(e), axis=1)
    order_2 = 0.5 * paddle.sum(square_of_sum - sum_of_squares, axis=1, keepdim=True)

    a = paddle.reshape(e, [-1, (num_fields + num_dense) * dim])
    a = perceptron(a, hidden, name="deepfm")
    y_dnn = linear(a, 1, name="deepfm.out")
    return order_1 + order_2 + y_dnn
