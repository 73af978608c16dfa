"""word2vec: skip-gram with negative sampling.

Mikolov et al., Distributed Representations of Words and Phrases and their Compositionality, NeurIPS 2013, equation 4
(https://arxiv.org/abs/1310.4546):

    log sigmoid(v'_O^T v_I) + sum_{i=1..k} log sigmoid(-v'_i^T v_I)

An example is a pair of words, with label 1 if the second one occurred near the first and 0 if it is a drawn negative,
so the objective is the logistic loss over pairs. Words as inputs and as outputs have tables of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import paddle

from .embedding import Embedding


def word2vec(
    ids: paddle.pir.Value,
    dense: paddle.pir.Value,
    *,
    embedding: Embedding,
    num_fields: int,
    dim: int,
    hidden: Sequence[int],
) -> paddle.pir.Value:
    """Builds the network; returns logits of a pair's words occurring together, `(batch, 1)` float32.

    Args:
        ids: `(batch, 2)` int64: input word and output word.
        dense: Not used.
        embedding: Looks up the rows.
        num_fields: 2.
        dim: Number of floats of a row.
        hidden: Not used: there is no layer.

    Raises:
        ValueError: `num_fields` is not 2.
    """
    del dense, hidden
    if num_fields != 2:
        raise ValueError(f"word2vec: examples have {num_fields} ids, should be 2: input word and output word")
    word, context = paddle.split(ids, 2, axis=1)
    v_input = embedding(word, name="word2vec.input", dim=dim, bound=0.5 / dim)  # (batch, 1, dim)
    v_output = embedding(context, name="word2vec.output", dim=dim, bound=0.5 / dim)
    return paddle.sum(v_input * v_output, axis=2)
