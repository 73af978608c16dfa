"""DCN V2: cross layers, whose outputs are polynomials of the inputs, in parallel with a deep network.

Wang et al., DCN V2: Improved Deep & Cross Network and Practical Lessons for Web-scale Learning to Rank Systems,
WWW 2021, equations 1 and 2 and the parallel structure of section 3.4 (https://arxiv.org/abs/2008.13535):

    x_0     = [e_1; e_2; ...; e_m; x]        e_i the row of field i, x the dense values
    x_{l+1} = x_0 * (W_l x_l + b_l) + x_l    `*` multiplies element by element
    y       = sigmoid(w^T [x_L; MLP(x_0)])
"""

from __future__ import annotations

from collections.abc import Sequence

import paddle

from .embedding import Embedding
from .perceptron import linear, perceptron

NUM_CROSS_LAYERS = 3


def dcn_v2(
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
    e = embedding(ids, name="dcn_v2.e", dim=dim, bound=0.01)  # (batch, m, dim)
    x_0 = paddle.concat([paddle.reshape(e, [-1, num_fields * dim]), dense], axis=1)
    x = x_0
    for layer in range(NUM_CROSS_LAYERS):
        x = x_0 * linear(x, width, name=f"dcn_v2.cross.{layer}") + x
    deep = perceptron(x_0, hidden, name="dcn_v2")
    return linear(paddle.concat([x, deep], axis=1), 1, name="dcn_v2.out")
