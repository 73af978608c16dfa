"""ESMM: conversion after a click, trained on all impressions.

Ma et al., Entire Space Multi-Task Model: An Effective Approach for Estimating Post-Click Conversion Rate, SIGIR 2018,
equations 2 and 3 (https://arxiv.org/abs/1804.07931):

    p(y = 1, z = 1 | x) = p(y = 1 | x) p(z = 1 | y = 1, x)         pCTCVR = pCTR pCVR
    L = sum_i l(y_i, pCTR_i) + sum_i l(y_i z_i, pCTCVR_i)

A tower computes pCTR, another one pCVR, from the same rows. pCVR has no label of its own: impressions without a click
have no conversion to learn from.
"""

from __future__ import annotations

from collections.abc import Sequence

import paddle
from paddle.nn.functional import log_sigmoid

from .embedding import Embedding
from .perceptron import linear, perceptron


def esmm(
    ids: paddle.pir.Value,
    dense: paddle.pir.Value,
    *,
    embedding: Embedding,
    num_fields: int,
    dim: int,
    hidden: Sequence[int],
) -> paddle.pir.Value:
    """Builds the network; returns logits of a click, and of a click with a conversion, `(batch, 2)` float32.

    Args:
        ids: `(batch, num_fields)` int64, one id per field.
        dense: `(batch, num_dense)` float32.
        embedding: Looks up the rows, which both towers share.
        num_fields: Number of fields.
        dim: Number of floats of a row.
        hidden: Widths of each tower's layers.
    """
    e = embedding(ids, name="esmm.e", dim=dim, bound=0.01)  # (batch, num_fields, dim)
    x = paddle.concat([paddle.reshape(e, [-1, num_fields * dim]), dense], axis=1)
    click = linear(perceptron(x, hidden, name="esmm.ctr"), 1, name="esmm.ctr.out")
    conversion = linear(perceptron(x, hidden, name="esmm.cvr"), 1, name="esmm.cvr.out")
    # The logit of pCTR pCVR, from logarithms: both may be too small for a product of float32. 1 - p is
    # (1 - pCTR) + pCTR (1 - pCVR).
    log_p = log_sigmoid(click) + log_sigmoid(conversion)
    log_not_p = paddle.logaddexp(log_sigmoid(-click), log_sigmoid(click) + log_sigmoid(-conversion))
    return paddle.concat([click, log_p - log_not_p], axis=1)
