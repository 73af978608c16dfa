"""The marker: what a flagged `embedding()` leaves in a Program.

A marker is an executable, forward-only op: it pulls the rows of its ids. So a Program that never goes through
`minimize` runs as it is, and no parameter of the table's size exists anywhere. Everything a rewrite needs to know of
the lookup travels as text on the op, because attributes survive `Program.clone` and Python objects do not.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from paddle.base.libpaddle import pir

from fleet_sparse.core.decay import Decay
from fleet_sparse.core.initializer import Initializer

from .op_names import LOOKUP
from .raw_op import Body, OutSpec, emit

ATTRIBUTE = "fleet_sparse_site"


@dataclass(frozen=True, kw_only=True)
class SiteSpec:
    """One flagged lookup, as the user wrote it."""

    table: str
    dim: int
    initializer: Initializer
    seed: int
    num_ids: int | None
    """The dictionary's size: how many distinct ids the user promises; None where Paddle ignores it."""
    bounded: bool
    """Whether ids must lie in [0, num_ids), as `is_sparse=True` without `is_distributed` means."""
    padding_idx: int | None
    """The id whose row reads as zeros and is never trained; None for none."""
    learning_rate: float
    """ParamAttr's multiplier of the optimizer's learning rate."""
    trainable: bool
    decay: Decay | None = None
    """That of ParamAttr's regularizer; None for the optimizer's."""
    need_clip: bool = True
    """Whether the optimizer's gradient clip concerns the table."""

    def to_json(self) -> str:
        """One line of JSON with sorted keys."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> SiteSpec:
        """The inverse of `to_json`."""
        values = json.loads(text)
        decay = None if values["decay"] is None else Decay(*values["decay"])
        return cls(**{**values, "initializer": Initializer(*values["initializer"]), "decay": decay})


def mark(ids: pir.Value, spec: SiteSpec, body: Body) -> pir.Value:
    """Emits the marker of one lookup; returns its rows, shape `ids.shape + [dim]`, float32.

    Args:
        ids: int64 or int32, of any rank.
        spec: The lookup.
        body: Pulls: reads the ids, fills the rows.
    """
    (rows,) = emit(LOOKUP, body, [ids], [OutSpec((*ids.shape, spec.dim), "float32")], {ATTRIBUTE: spec.to_json()})
    rows.stop_gradient = not spec.trainable
    return rows


def is_marker(op: pir.Operation) -> bool:
    """Whether `op` was made by `mark`."""
    return bool(op.has_attr(ATTRIBUTE))


def spec_of(op: pir.Operation) -> SiteSpec:
    """What the marker `op` says of its lookup."""
    return SiteSpec.from_json(op.str_attr(ATTRIBUTE))
