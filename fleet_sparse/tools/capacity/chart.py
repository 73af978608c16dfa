"""Chart of a plan: time of a step over the number of pservers, one curve for each network bandwidth."""

from __future__ import annotations

import io

from fleet_sparse.errors import SettingError

from .coefficients import CostCoefficients
from .job import MAX_PSERVERS
from .plan import CapacityPlan, counts_from, plan_on

NETWORKS_BITS_PER_S = (1e9, 10e9, 100e9)
"""Bandwidths that every chart shows besides that of the plan."""
MAX_FACTOR = 16
"""The chart reaches from the plan's number of pservers divided by this to that multiplied by it."""


def curves(found: CapacityPlan, coefficients: CostCoefficients) -> dict[float, list[tuple[int, float]]]:
    """Returns, by bandwidth in bits/s, numbers of pservers that have enough memory, each with its step in ms."""
    first = max(found.least_pservers, found.num_pservers // MAX_FACTOR)
    counts = counts_from(first, min(max(found.num_pservers, first) * MAX_FACTOR, MAX_PSERVERS))
    by_bandwidth = {}
    for bits_per_s in sorted({*NETWORKS_BITS_PER_S, found.machines.network_bits_per_s}):
        machines = found.machines._replace(network_bits_per_s=bits_per_s)
        by_bandwidth[bits_per_s] = [
            (count, 1e3 * plan_on(found.job, machines, coefficients, count).step_s) for count in counts
        ]
    return by_bandwidth


def chart(found: CapacityPlan, coefficients: CostCoefficients) -> str:
    """Returns the chart as SVG, with the plan as a point.

    Raises:
        SettingError: Matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SettingError("plan: --chart needs matplotlib. Install `fleet-sparse[plot]`") from error
    job, machines = found.job, found.machines
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fleet-sparse"}):
        axes = (figure := Figure(figsize=(7.2, 4.3), layout="constrained")).subplots()
        for bits_per_s, points in curves(found, coefficients).items():
            axes.loglog(*zip(*points, strict=True), label=f"{bits_per_s / 1e9:g} Gbit/s")
        label = f"{found.num_pservers:,} pservers, {machines.network_bits_per_s / 1e9:g} Gbit/s: {found.limit}"
        axes.plot(found.num_pservers, 1e3 * found.step_s, "ko", label=label)
        axes.set_title(f"Model: {job.workers:,} workers, {job.mode}, {job.rows:.3g} rows of dim {job.dim}, {job.rule}")
        axes.set_xlabel("pservers")
        axes.set_ylabel("ms per step")
        axes.grid(visible=True, which="both", color="#ddd")
        axes.legend()
        svg = io.StringIO()
        figure.savefig(svg, format="svg", metadata={"Date": None})
    return svg.getvalue()
