"""DSSM: two towers map queries and documents to one space; their cosine is the relevance.

Huang et al., Learning Deep Structured Semantic Models for Web Search using Clickthrough Data, CIKM 2013, equations 3
to 5 (https://dl.acm.org/doi/10.1145/2505515.2505665):

    y       = tanh(W_N ... tanh(W_1 x))      x the sum of the rows of a text's words, the paper's word hashing layer
    R(Q, D) = cosine(y_Q, y_D)
    P(D | Q) = softmax(gamma R(Q, D))

The paper compares a clicked document with a few others of the same query. Here an example is one pair with its label,
and the loss is logistic, of `gamma R + b` with both trained.
"""

from __future__ import annotations

from collections.abc import Sequence

import paddle
from paddle import ParamAttr
from paddle.nn.initializer import Constant

from .embedding import Embedding
from .perceptron import perceptron

PADDING_ID = 0
"""Id of the places of a text that is shorter than the others. It has a row of zeros, and so adds nothing."""
FIRST_GAMMA = 5.0


def dssm(
    ids: paddle.pir.Value,
    dense: paddle.pir.Value,
    *,
    embedding: Embedding,
    num_fields: int,
    dim: int,
    hidden: Sequence[int],
) -> paddle.pir.Value:
    """Builds the network; returns logits of a document being relevant for a query, `(batch, 1)` float32.

    Args:
        ids: `(batch, num_fields)` int64: the query's words, then as many of the document, padded with `PADDING_ID`.
        dense: Not used.
        embedding: Looks up the rows; queries and documents share one table.
        num_fields: Twice the number of words of a text.
        dim: Number of floats of a row.
        hidden: Widths of each tower's layers.

    Raises:
        ValueError: `num_fields` is odd.
    """
    del dense
    if num_fields % 2:
        raise ValueError(f"dssm: examples have {num_fields} ids, should be an even number: query and document")
    e = embedding(ids, name="dssm.word", dim=dim, bound=0.05, padding_id=PADDING_ID)  # (batch, num_fields, dim)
    towers = []
    for name, rows in zip(("query", "document"), paddle.split(e, 2, axis=1), strict=True):
        towers.append(perceptron(paddle.sum(rows, axis=1), hidden, name=f"dssm.{name}", activation="tanh"))
    relevance = paddle.nn.functional.cosine_similarity(*towers, axis=1)
    scale, bias = (
        paddle.static.create_parameter([1], "float32", attr=ParamAttr(name=f"dssm.{name}", initializer=Constant(value)))
        for name, value in (("gamma", FIRST_GAMMA), ("bias", 0.0))
    )
    return scale * paddle.unsqueeze(relevance, 1) + bias
