"""Kernels of a store alone, for the scale benchmark: CPU of a row pulled and pushed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from benchmarks.options import TRAINED
from benchmarks.scale_jobs import RULE
from benchmarks.yardstick import Yardstick
from fleet_sparse.core.initializer import uniform
from fleet_sparse.core.rules import RULES
from fleet_sparse.core.table import TableSpec
from fleet_sparse.core.warm_up import warm_up
from fleet_sparse.pserver.storage.table_store import TableStore

DIMS = (8, 16, 64, 256, 1024, 4096)
MOST_BYTES = 256 << 20  # of a store: past every cache
NUM_IDS = 13_000
CALLS = 16
FAR = 10  # times as many rows


def kernel_ns(
    yardstick: Yardstick, rule: str, dim: int, most_rows: int, most_bytes: int = MOST_BYTES
) -> tuple[float, float]:
    """CPU of pulling one row and of pushing one, the medians of several calls; for each second of the yardstick."""
    spec = TableSpec(name="kernels", dim=dim, rule=rule, initializer=uniform(-0.01, 0.01))
    num_rows = min(most_rows, most_bytes // (4 * dim * (1 + spec.update_rule.num_states)))
    warm_up()
    store, rng = TableStore(spec), np.random.default_rng(0)
    num_ids = min(NUM_IDS, num_rows // 2)
    grads = rng.standard_normal((num_ids, dim)).astype(np.float32)
    for begin in range(0, num_rows, num_ids):
        ids = np.arange(begin, min(begin + num_ids, num_rows))
        store.push(ids, grads[: len(ids)], 0.05, 1)
    out = np.empty_like(grads)
    seconds = np.empty((CALLS, 2))
    read_s = yardstick.read()
    for call in range(CALLS):  # none between them is of the yardstick, which takes the caches
        ids = rng.integers(0, num_rows, num_ids)
        begun = time.thread_time()
        store.pull(ids, out)
        pulled = time.thread_time()
        store.push(ids, grads, 0.05, 2)
        seconds[call] = pulled - begun, time.thread_time() - pulled
    read_s = (read_s + yardstick.read()) / 2
    store.close()
    pull_ns, push_ns = (1e9 * np.median(seconds, axis=0) / num_ids / read_s).tolist()
    return pull_ns, push_ns


class Kernels(NamedTuple):
    """Of one pass, for each second of the yardstick: CPU ns to pull a row and to push it."""

    of_rules: Mapping[tuple[str, int], tuple[float, float]]
    """By rule and dim."""
    far: tuple[float, float]
    """Of a larger store."""


def time_kernels(yardstick: Yardstick, num_rows: int) -> Kernels:
    """One pass over all."""
    of_rules = {(rule, dim): kernel_ns(yardstick, rule, dim, num_rows) for rule, dim in product(TRAINED, DIMS)}
    return Kernels(of_rules, kernel_ns(yardstick, RULE, 16, FAR * num_rows, FAR * MOST_BYTES))


def kernel_costs(passes: Sequence[Kernels], num_rows: int, yardstick_s: float) -> dict[str, Any]:
    """As `Costs` has them, the least of the passes, at the speed at which the yardstick takes so long.

    What the kernels take more in a job than at their best is found as the price of a row; what they took too much here
    would be in no job, and no price is below 0.
    """
    of_rules = {
        key: yardstick_s * np.min([each.of_rules[key] for each in passes], axis=0) for key in passes[0].of_rules
    }
    far = yardstick_s * np.min([each.far for each in passes], axis=0)
    far_pull_ns, far_push_ns = np.maximum(far - of_rules[RULE, 16], 0.0).tolist()
    return {
        "kernel_rows": num_rows,
        "pull_ns": {dim: float(np.median([of_rules[rule, dim][0] for rule in TRAINED])) for dim in DIMS},
        "push_ns": {rule: {dim: float(of_rules[rule, dim][1]) for dim in DIMS} for rule in TRAINED},
        "far_rows": FAR * num_rows,
        "far_pull_ns": far_pull_ns,
        "far_push_ns": far_push_ns,
        "num_states": {rule: RULES[rule].num_states for rule in TRAINED},
    }
