"""A chart of a plan: the time of a step over the number of pservers, by the speed of the network. A model."""

from __future__ import annotations

from fleet_sparse import plot
from fleet_sparse.costs import Costs
from fleet_sparse.plan import MAX_PSERVERS, Plan, counts_from, plan_on

NETWORKS_BITS_PER_S = (1e9, 10e9, 100e9)
"""Besides that of the plan."""
_WIDER = 16
"""How many times fewer and more pservers than the plan's are shown."""


def chart(found: Plan, costs: Costs) -> str:
    """SVG: a curve for each speed of the network, and the plan as a point.

    The curves begin with the fewest pservers that have the memory.
    """
    job, machines = found.job, found.machines
    first = max(found.least_pservers, found.num_pservers // _WIDER)
    last = min(max(found.num_pservers, first) * _WIDER, MAX_PSERVERS)
    counts = counts_from(first, last)
    series = {}
    for bits_per_s in sorted({*NETWORKS_BITS_PER_S, machines.network_bits_per_s}):
        others = machines._replace(network_bits_per_s=bits_per_s)
        steps = [(count, 1e3 * plan_on(job, others, costs, count).step_s) for count in counts]
        series[f"{bits_per_s / 1e9:g} Gbit/s"] = steps
    title = f"Model: a step of {job.workers:,} workers, {job.mode}, {job.rows:.3g} rows of dim {job.dim}, {job.rule}"
    told = f"{found.num_pservers:,} pservers, {machines.network_bits_per_s / 1e9:g} Gbit/s: {found.limit}"
    mark = plot.Mark(found.num_pservers, 1e3 * found.step_s, told)
    return plot.lines(title, "pservers", "ms a step", series, log_y=True, mark=mark)
