"""Costs: what a request, a row and a byte cost, as `benchmarks/scale.py` measured it. `docs/scaling.md` tells how."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import log10
from pathlib import Path
from typing import Any, NamedTuple

from fleet_sparse.errors import SettingError

SHIPPED = Path(__file__).with_name("costs.json")


class Work(NamedTuple):
    """What is done in one step; of a worker, or at one pserver for one worker.

    Attributes:
        steps: 1 at a worker, 0 at a pserver.
        requests: Frames that are asked and answered.
        blocks: Of these frames: of each request one for each table and dense array in it.
        ids: Given to the program by the batch, repeated ones too; at a worker.
        rows: Pulled and pushed.
        row_bytes: Bytes of their values.
        dense_bytes: Bytes of dense values, pushed and pulled.
        replica_bytes: Bytes of dense values that a worker computes itself, as it is alone.
    """

    steps: float = 0.0
    requests: float = 0.0
    blocks: float = 0.0
    ids: float = 0.0
    rows: float = 0.0
    row_bytes: float = 0.0
    dense_bytes: float = 0.0
    replica_bytes: float = 0.0


class Price(Work):
    """Nanoseconds of CPU that one of each unit of `Work` costs a thread or process."""

    def seconds(self, work: Work) -> float:
        """What the work takes."""
        return 1e-9 * sum(price * amount for price, amount in zip(self, work, strict=True))


class Prices(NamedTuple):
    """What each party pays.

    Attributes:
        worker: All threads of a worker, without its program.
        data_thread: Of a pserver, without the kernels that find, read and update rows. Sync merges pushes there.
        io_thread: All other threads of a pserver; they take frames from the network and give them to it.
    """

    worker: Price
    data_thread: Price
    io_thread: Price


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What was measured on one machine.

    Attributes:
        prices: By mode of training, `"async"` and `"sync"`; of a thread that is never idle and has a core for itself.
        cold: What a thread that is idle almost all the time pays more for the same work, as a share of it: its caches
            are cold.
        crowded: What a thread pays more where almost all processes of its machine find no core, as a share of it.
        io_share: What of the I/O threads' time for a pull, or for a push that is waited for, makes the step longer; the
            rest goes on meanwhile.
        kernel_rows: Rows of the store that the kernels were measured on; fewer where rows and states are long.
        pull_ns: Of the kernels that read a row, by dim.
        push_ns: By rule, of the kernels that update a row, by dim.
        far_rows: Rows of a store that no cache helps with.
        far_pull_ns: What reading a row of it costs more.
        far_push_ns: What updating one does.
        num_states: By rule, arrays of `dim` floats beside a row.
        pserver_bytes: Memory of a pserver without rows.
        measured: Commit, date and machine.
        checks: What the model said of jobs that were run: name, measured and predicted microseconds of a step.
        left_out: Steps of large jobs, in milliseconds: by all prices, and the shortest and the longest by prices that
            were fitted without one case, with its name.
    """

    prices: Mapping[str, Prices]
    cold: float
    crowded: float
    io_share: float
    kernel_rows: float
    pull_ns: Mapping[int, float]
    push_ns: Mapping[str, Mapping[int, float]]
    far_rows: float
    far_pull_ns: float
    far_push_ns: float
    num_states: Mapping[str, int]
    pserver_bytes: float
    measured: Mapping[str, Any]
    checks: tuple[Mapping[str, Any], ...]
    left_out: tuple[Mapping[str, Any], ...] = ()

    @property
    def rules(self) -> list[str]:
        """Those whose costs are known."""
        return sorted(self.push_ns)

    def slowdown(self, busy_s: float, step_s: float, workers: int = 1, crowd: float = 0.0) -> float:
        """How many times longer a thread takes for what would take it `busy_s`, were it never idle and had it a core.

        It grows with the share of the step that it is idle, up to `1 + cold` times; and with the crowd, up to
        `1 + crowded` times.

        Args:
            busy_s: For one worker's step.
            step_s: Of a step of each worker; 0 if no thread is ever idle in it.
            workers: For which it does the same meanwhile.
            crowd: Share of the processes of its machine that there are no cores for.
        """
        of_crowd = 1 + self.crowded * crowd
        busy = workers * of_crowd * busy_s / step_s if step_s else 1.0
        return of_crowd * max((1 + self.cold) / (1 + self.cold * busy), 1.0)

    def kernel_s(self, rule: str, dim: int, store_rows: float) -> float:
        """Seconds to pull a row and push it, of a store with so many rows."""
        distance = log10(max(store_rows, 1.0) / self.kernel_rows) / log10(self.far_rows / self.kernel_rows)
        far = min(max(distance, 0.0), 1.0)
        near_ns = _at(self.pull_ns, dim) + _at(self.push_ns[rule], dim)
        return 1e-9 * (near_ns + far * (self.far_pull_ns + self.far_push_ns))


def parse_costs(text: str, where: str) -> Costs:
    """The costs that `benchmarks/scale.py` wrote.

    Args:
        text: JSON.
        where: Of it, for messages.

    Raises:
        SettingError: The text is no such JSON.
    """
    try:
        fields = json.loads(text)
        fields["prices"] = {
            mode: Prices(**{party: Price(**price) for party, price in fields["prices"][mode].items()})
            for mode in ("async", "sync")
        }
        fields["pull_ns"] = _by_dim(fields["pull_ns"])
        fields["push_ns"] = {rule: _by_dim(of_rule) for rule, of_rule in fields["push_ns"].items()}
        fields["checks"] = tuple(fields["checks"])
        fields["left_out"] = tuple(fields.get("left_out", ()))
        return Costs(**fields)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SettingError(
            f"{where}: it cannot be read as costs ({error}), should be what benchmarks/scale.py wrote. Measure again"
        ) from error


@lru_cache(maxsize=1)
def shipped_costs() -> Costs:
    """Those that come with the package."""
    return parse_costs(SHIPPED.read_text(encoding="utf-8"), str(SHIPPED))


def _by_dim(values: Mapping[str, float]) -> dict[int, float]:
    by_dim = {int(dim): float(value) for dim, value in sorted(values.items(), key=lambda item: int(item[0]))}
    if len(by_dim) < 2:
        raise ValueError(f"{len(by_dim)} dims, should be at least 2")
    return by_dim


def _at(by_dim: Mapping[int, float], dim: int) -> float:
    """On the line between the two nearest dims; below the first its value, above the last the line goes on."""
    dims = list(by_dim)
    if dim <= dims[0]:
        return by_dim[dims[0]]
    spans = list(pairwise(dims))
    low, high = spans[min(bisect_right(dims, dim), len(spans)) - 1]
    return by_dim[low] + (dim - low) * (by_dim[high] - by_dim[low]) / (high - low)
