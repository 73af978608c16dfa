"""The costs that tell the CPU of the scale benchmark's jobs, and what the model makes of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from benchmarks.large_jobs import EXAMPLES
from benchmarks.scale_jobs import RULE, Measured
from fleet_sparse.core.mode import ASYNC, SYNC
from fleet_sparse.costs import Costs, Price, Prices, Work, parse_costs
from fleet_sparse.plan import Cpu, Machines, cpu_of, plan, plan_on, times_of

AT_PSERVER = ("requests", "blocks", "rows", "row_bytes", "dense_bytes")
COLD = [number / 4 for number in range(13)]  # that are tried
CROWDED = [number / 10 for number in range(9)]
IO_SHARES = [number / 10 for number in range(11)]
LOOPBACK = Machines(memory_bytes=1e12, network_bits_per_s=1e15, shared_cores=len(os.sched_getaffinity(0)))


def fitted(
    units: Sequence[str],
    measured: Sequence[Measured],
    seconds: Callable[[Measured], float],
    known: Callable[[Measured], float],
) -> dict[str, float]:
    """Prices of these units, by the least squares of the relative errors of `seconds`.

    While a price is below 0, the lowest one is left at 0 for good, and the others are fitted again: so another set of
    units at 0 might have a smaller sum.

    Args:
        units: Of `Work`.
        measured: Cases.
        seconds: What is explained.
        known: What of it is known already.
    """
    totals = np.array([1e9 * seconds(each) for each in measured])
    works = [each.work for each in measured]
    amounts = np.array([[getattr(work, unit) for unit in units] for work in works]) / totals[:, None]
    targets = 1 - np.array([1e9 * known(each) for each in measured]) / totals
    kept = [column for column in range(len(units)) if amounts[:, column].any()]
    while True:
        prices = np.linalg.lstsq(amounts[:, kept], targets)[0]
        if not kept or prices.min() >= 0:
            return {units[column]: round(float(price), 5) for column, price in zip(kept, prices, strict=True)}
        kept.pop(int(prices.argmin()))


def alone_s(each: Measured, party: str, costs: Costs) -> float:
    """CPU of a party in a step, as if its thread had had a core for itself, and never been idle."""
    spent_s = {"worker": each.middle.worker_s, "data_thread": each.middle.data_s, "io_thread": each.middle.io_s}[party]
    workers, pservers = each.group.workers, each.group.pservers
    share = 1.0 if party == "worker" else workers / pservers
    shared_s = spent_s / (1 + costs.cold * max(1 - share * spent_s / each.middle.step_s, 0.0))
    return shared_s / (1 + costs.crowded * LOOPBACK.crowd(workers + pservers))


def fit(measured: Sequence[Measured], kernels: dict[str, Any], pserver_bytes: float) -> Costs:
    """The costs: prices from CPU, `cold`, `crowded` and the I/O share from the seconds of fitted cases.

    Of each `cold` and `crowded` that are tried the prices are those that explain the CPU best, and the I/O share is
    that with which the formulae come nearest to the seconds, from the CPU of each case itself. Taken are those with
    which the model as a whole comes nearest to the seconds.
    """
    fields: dict[str, Any] = {**kernels, "pserver_bytes": pserver_bytes}
    fields |= {"cold": 0.0, "crowded": 0.0, "io_share": 0.0, "measured": {}, "checks": ()}
    nothing: dict[str, Any] = {mode: {party: {} for party in Prices._fields} for mode in (ASYNC, SYNC)}
    costs = parse_costs(json.dumps(fields | {"prices": nothing}), "kernels")

    kept = [each for each in measured if each.is_fitted]
    tried = []
    for cold, crowded in product(COLD, CROWDED):
        costs = replace(costs, cold=cold, crowded=crowded)
        costs = replace(costs, prices=priced(kept, costs))
        of_shares = (replace(costs, io_share=share) for share in IO_SHARES)
        tried.append(min(of_shares, key=partial(step_error, kept, from_own_cpu_s)))
    return min(tried, key=partial(step_error, kept, predicted_s))


def step_error(measured: Sequence[Measured], told_s: Callable[[Measured, Costs], float], costs: Costs) -> float:
    """Sum of the squares by which what is told of the seconds of steps is off, as a share of them."""
    return sum((told_s(each, costs) / each.middle.step_s - 1) ** 2 for each in measured)


def priced(measured: Sequence[Measured], costs: Costs) -> dict[str, Prices]:
    """Prices of each mode, fitted to its cases; the rest is of `costs`."""

    def of_kernels(each: Measured) -> float:
        return each.work.rows / 2 * costs.kernel_s(RULE, each.case.dim, each.job.rows / each.group.pservers)

    prices = {}
    for mode in (ASYNC, SYNC):
        ours = [each for each in measured if each.group.mode == mode]
        of_mode = {}
        for party in Prices._fields:
            units = Work._fields if party == "worker" else AT_PSERVER
            known = of_kernels if party == "data_thread" else free
            of_mode[party] = Price(**fitted(units, ours, partial(alone_s, party=party, costs=costs), known))
        prices[str(mode)] = Prices(**of_mode)
    return prices


def left_out(
    measured: Sequence[Measured], kernels: dict[str, Any], pserver_bytes: float, costs: Costs
) -> list[dict[str, Any]]:
    """How far the steps of large jobs move if all that is fitted, `costs`, is fitted without one case."""
    others = {
        each.name: fit([other for other in measured if other is not each], kernels, pserver_bytes)
        for each in measured
        if each.is_fitted
    }
    found = []
    for name, job, machines, given in EXAMPLES:
        chosen = plan(job, machines, costs, given)
        pservers = chosen.num_pservers
        steps_ms = {without: 1e3 * plan_on(job, machines, of, pservers).step_s for without, of in others.items()}
        shortest, longest = (pick(steps_ms, key=steps_ms.__getitem__) for pick in (min, max))
        found.append(
            {
                "name": f"{name}, {pservers} pservers",
                "step_ms": round(1e3 * chosen.step_s, 2),
                "shortest_ms": round(steps_ms[shortest], 2),
                "shortest_without": shortest,
                "longest_ms": round(steps_ms[longest], 2),
                "longest_without": longest,
            }
        )
    return found


def free(_: Measured) -> float:
    """Nothing is known."""
    return 0.0


def predicted_s(each: Measured, costs: Costs) -> float:
    """Of a step, as the model has it."""
    return plan_on(each.job, LOOPBACK, costs, each.group.pservers).step_s


def from_own_cpu_s(each: Measured, costs: Costs) -> float:
    """Of a step, by the model's formulae from the CPU of this very case: what is off then is not the prices."""
    pservers = each.group.pservers
    of_model = cpu_of(each.job, LOOPBACK, costs, pservers)
    client, io = each.middle.worker_s, each.middle.io_s / pservers
    cpu = Cpu(
        client=client,
        after_push=of_model.after_push / of_model.client * client,
        data=each.middle.data_s / pservers,
        io=io,
        waited_io=of_model.waited_io / of_model.io * io,
    )
    return times_of(each.job, LOOPBACK, pservers, cpu)[1]
