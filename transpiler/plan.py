"""Decides how the lookups of a Program are rewritten. Raises every refusal, before anything changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import NamedTuple

from paddle.base.libpaddle import pir

from fleet_sparse.core.embedding_spec import EmbeddingSpec
from fleet_sparse.errors import PlanError

from .scan import ScannedProgram, Site


class TablePlan(NamedTuple):
    """One table of a prefetch."""

    embedding: EmbeddingSpec
    """The spec that all its lookups declare."""
    sites: tuple[int, ...]
    """Positions in `RewritePlan.sites` of the lookups on this table."""
    is_padded: bool
    """True if a lookup has a padding id: the prefetched rows then end with a row of zeros that is never trained."""


class RewritePlan(NamedTuple):
    """One prefetch: the lookups that it joins, table by table."""

    tables: tuple[TablePlan, ...]
    sites: tuple[Site, ...]
    hoisted: tuple[pir.Operation, ...]
    """Ops to move before the first lookup, in this order: they compute ids of later lookups."""


def plan_training(scanned: ScannedProgram) -> RewritePlan:
    """One prefetch of all lookups of a Program that is about to be differentiated.

    Raises:
        PlanError: A lookup cannot be trained where it is, or two lookups contradict each other.
    """
    if scanned.is_trained:
        raise PlanError("minimize: this Program was minimized before. Build the model again in another Program")
    for site in scanned.sites:
        if site.control_flow:
            raise PlanError(
                f"{site}: the lookup is inside {site.control_flow}, which cannot be trained. "
                "Look the rows up before the control flow and use them inside"
            )
        if site.ids_need:
            others = ", ".join(str(scanned.sites[number]) for number in site.ids_need)
            raise PlanError(
                f"{site}: its ids are computed from the rows of {others}; all ids of a step must be known before its "
                "first lookup. Compute them from the inputs"
            )
    return _join(scanned.sites)


def plan_evaluation(scanned: ScannedProgram) -> RewritePlan:
    """One prefetch of the lookups of a Program that is only run; those that cannot join stay placeholder ops.

    Raises:
        PlanError: Two lookups contradict each other.
    """
    return _join([site for site in scanned.sites if not site.control_flow and not site.ids_need])


def _join(sites: Sequence[Site]) -> RewritePlan:
    tables: dict[str, list[int]] = {}
    for position, site in enumerate(sites):
        tables.setdefault(site.spec.embedding.name, []).append(position)
        _check_same_table(sites[tables[site.spec.embedding.name][0]], site)
    first = min((site.position for site in sites), default=0)
    late = {position: op for site in sites for position, op in site.producers if position > first}
    return RewritePlan(
        tables=tuple(
            TablePlan(
                embedding=sites[positions[0]].spec.embedding,
                sites=tuple(positions),
                is_padded=any(sites[position].spec.padding_idx is not None for position in positions),
            )
            for positions in tables.values()
        ),
        sites=tuple(sites),
        hoisted=tuple(op for _, op in sorted(late.items(), key=lambda entry: entry[0])),
    )


def _check_same_table(first: Site, other: Site) -> None:
    ours, theirs = first.spec.embedding, other.spec.embedding
    for field in fields(EmbeddingSpec):
        one, two = getattr(ours, field.name), getattr(theirs, field.name)
        if one != two:
            raise PlanError(
                f"table {ours.name!r}: {field.name} is {one} at lookup {first.number} and {two} at lookup "
                f"{other.number}; lookups that share a ParamAttr name share one table. Give both the "
                "same value, or another name"
            )
