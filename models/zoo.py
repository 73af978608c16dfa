"""The models of the zoo, each with a known model that its examples can be drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import paddle

from . import behaviours, synthetic, texts
from .dcn import dcn
from .dcn_v2 import dcn_v2
from .deepfm import deepfm
from .din import din
from .dnn import dnn
from .drawn import Draw
from .dssm import dssm
from .embedding import Embedding
from .esmm import esmm
from .mmoe import mmoe
from .wide_deep import wide_deep
from .word2vec import word2vec
from .xdeepfm import xdeepfm


class Network(Protocol):
    """Builds the operators of a model."""

    def __call__(
        self,
        ids: paddle.pir.Value,
        dense: paddle.pir.Value,
        *,
        embedding: Embedding,
        num_fields: int,
        dim: int,
        hidden: Sequence[int],
    ) -> paddle.pir.Value:
        """Returns logits, `(batch, num_labels)` float32.

        Args:
            ids: `(batch, num_fields)` int64.
            dense: `(batch, num_dense)` float32.
            embedding: Looks up the rows.
            num_fields: Number of ids of an example.
            dim: Number of floats of a row.
            hidden: Widths of the layers.
        """


class ZooModel(NamedTuple):
    """A model and its data."""

    network: Network
    draw: Draw
    """Draws examples whose truth is known."""
    reads_clicks: bool
    """True if it also trains on any fields with one label: the flights, Criteo's logs, slot files."""


MODELS = {
    "dnn": ZooModel(dnn, synthetic.draw, True),
    "wide_deep": ZooModel(wide_deep, synthetic.draw, True),
    "deepfm": ZooModel(deepfm, synthetic.draw, True),
    "xdeepfm": ZooModel(xdeepfm, synthetic.draw, True),
    "dcn": ZooModel(dcn, synthetic.draw, True),
    "dcn_v2": ZooModel(dcn_v2, synthetic.draw, True),
    "din": ZooModel(din, behaviours.draw, False),
    "mmoe": ZooModel(mmoe, synthetic.draw_conversions, False),
    "esmm": ZooModel(esmm, synthetic.draw_conversions, False),
    "word2vec": ZooModel(word2vec, texts.draw_words, False),
    "dssm": ZooModel(dssm, texts.draw, False),
}
