"""The placeholder op: what a flagged `embedding()` inserts into a Program.

It is executable and forward-only: it pulls the rows of its ids. So a Program that never goes through `minimize` runs as
it is, and no parameter of the table's size exists anywhere. Everything that a rewrite needs to know of the lookup is
text on the op, because attributes survive `Program.clone` and Python objects do not.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import NamedTuple

from paddle.base.libpaddle import pir

from fleet_sparse.core.decay import Decay
from fleet_sparse.core.embedding_spec import EmbeddingSpec
from fleet_sparse.core.entries import Entry
from fleet_sparse.core.initializer import Initializer

from .op_names import LOOKUP
from .raw_op import Body, OutSpec, emit

ATTRIBUTE = "fleet_sparse_site"
SITES = "fleet_sparse_sites"
"""Attribute of a prefetch op: the lookups that it joins."""


class SiteSpec(NamedTuple):
    """One flagged lookup: an embedding and the padding id of this lookup."""

    embedding: EmbeddingSpec
    padding_idx: int | None = None
    """The id whose row reads as zeros and is never trained; None for none."""

    def to_json(self) -> str:
        """One line of JSON with sorted keys; `parse_site` reads it."""
        return json.dumps({"embedding": asdict(self.embedding), "padding_idx": self.padding_idx}, sort_keys=True)


def parse_site(text: str) -> SiteSpec:
    """The lookup that `SiteSpec.to_json` wrote."""
    values = json.loads(text)
    fields = values["embedding"]
    decay = None if fields["decay"] is None else Decay(*fields["decay"])
    entry = None if fields["entry"] is None else Entry(*fields["entry"])
    if entry is not None:
        entry = entry._replace(settings=tuple((name, value) for name, value in entry.settings))
    show_click = None if fields["show_click"] is None else tuple(fields["show_click"])
    embedding = EmbeddingSpec(
        **{
            **fields,
            "initializer": Initializer(*fields["initializer"]),
            "decay": decay,
            "entry": entry,
            "show_click": show_click,
        }
    )
    return SiteSpec(embedding, values["padding_idx"])


def sites_to_json(sites: Sequence[SiteSpec]) -> str:
    """One line of JSON; `parse_sites` reads it."""
    return json.dumps([site.to_json() for site in sites])


def parse_sites(text: str) -> list[SiteSpec]:
    """The lookups that `sites_to_json` wrote."""
    return [parse_site(site) for site in json.loads(text)]


def insert_placeholder(ids: pir.Value, spec: SiteSpec, body: Body) -> pir.Value:
    """Inserts the placeholder op of one lookup; returns its rows, shape `ids.shape + [dim]`, float32.

    Args:
        ids: int64 or int32, of any rank.
        spec: The lookup.
        body: Pulls: reads the ids and fills the rows.
    """
    outputs = [OutSpec((*ids.shape, spec.embedding.dim), "float32")]
    (rows,) = emit(LOOKUP, body, [ids], outputs, {ATTRIBUTE: spec.to_json()})
    rows.stop_gradient = not spec.embedding.is_trainable
    return rows


def is_placeholder(op: pir.Operation) -> bool:
    """Returns whether `insert_placeholder` made `op`."""
    return bool(op.has_attr(ATTRIBUTE))


def site_of(op: pir.Operation) -> SiteSpec:
    """The lookup that the placeholder op `op` stands for."""
    return parse_site(op.str_attr(ATTRIBUTE))
