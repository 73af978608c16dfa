"""Layers for dygraph whose rows are on pservers, and what a training loop in dygraph may call."""

from __future__ import annotations

from fleet_sparse.plugin.dygraph.embeddings import Embeddings
from fleet_sparse.plugin.dygraph.layers import Embedding
from fleet_sparse.plugin.dygraph.use_tables import set_num_examples, use_tables

__all__ = ["Embedding", "Embeddings", "set_num_examples", "use_tables"]
