"""Decides how the lookups of a Program are rewritten. Every refusal is raised here, before anything changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import NamedTuple

from paddle.base.libpaddle import pir

from fleet_sparse.errors import PlanError

from .placeholder import SiteSpec
from .scan import Scan, Site


class TablePlan(NamedTuple):
    """One table of the prefetch."""

    spec: SiteSpec
    """What its sites agree on; `padding_idx` is a matter of each site and None here."""
    sites: tuple[int, ...]
    """Positions in `Plan.sites` of the lookups on this table."""
    is_padded: bool
    """Whether some site has a padding id: the prefetched rows then end with a row of zeros that is never trained."""


class Plan(NamedTuple):
    """One prefetch: the lookups it joins, table by table."""

    tables: tuple[TablePlan, ...]
    sites: tuple[Site, ...]
    hoisted: tuple[pir.Operation, ...]
    """Ops to move before the first site, in this order: ids of later sites are computed by them."""


def plan_training(scan: Scan) -> Plan:
    """One prefetch of all lookups of a Program that is about to be differentiated.

    Raises:
        PlanError: A lookup cannot be trained where it is, or two lookups contradict each other.
    """
    if scan.is_trained:
        raise PlanError("minimize: this Program was minimized before. Build the model anew in another Program")
    for site in scan.sites:
        if site.control_flow:
            raise PlanError(
                f"{site}: the lookup is inside {site.control_flow}, which cannot be trained. "
                "Look the rows up before the control flow and use them inside"
            )
        if site.ids_need:
            others = ", ".join(str(scan.sites[number]) for number in site.ids_need)
            raise PlanError(
                f"{site}: its ids are computed from the rows of {others}; all ids of a step must be known before its "
                "first lookup. Compute them from the inputs"
            )
    return _join(scan.sites)


def plan_evaluation(scan: Scan) -> Plan:
    """One prefetch of the lookups of a Program that is only run; those that cannot join stay markers, which work.

    Raises:
        PlanError: Two lookups contradict each other.
    """
    return _join([site for site in scan.sites if not site.control_flow and not site.ids_need])


def _join(sites: Sequence[Site]) -> Plan:
    tables: dict[str, list[int]] = {}
    for position, site in enumerate(sites):
        tables.setdefault(site.spec.table, []).append(position)
        _check_same_table(sites[tables[site.spec.table][0]], site)
    first = min((site.position for site in sites), default=0)
    late = {position: op for site in sites for position, op in site.producers if position > first}
    return Plan(
        tables=tuple(
            TablePlan(
                spec=_of_table(sites[positions[0]].spec),
                sites=tuple(positions),
                is_padded=any(sites[position].spec.padding_idx is not None for position in positions),
            )
            for positions in tables.values()
        ),
        sites=tuple(sites),
        hoisted=tuple(op for _, op in sorted(late.items(), key=lambda entry: entry[0])),
    )


def _of_table(spec: SiteSpec) -> SiteSpec:
    return replace(spec, padding_idx=None)


def _check_same_table(first: Site, other: Site) -> None:
    ours, theirs = _of_table(first.spec), _of_table(other.spec)
    for field in fields(SiteSpec):
        one, two = getattr(ours, field.name), getattr(theirs, field.name)
        if one != two:
            raise PlanError(
                f"table {ours.table!r}: {field.name} is {one} at site {first.number} and {two} at site {other.number}; "
                "lookups that share a ParamAttr name share one table. Write the same, or another name"
            )
