"""Cost coefficients: CPU of a request, a row and a byte, as `benchmarks/calibration.py` derives them from records."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import msgspec

from .traffic import StepTraffic

SHIPPED = Path(__file__).with_name("coefficients.json")


class CpuCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Nanoseconds of CPU of one unit of each kind, in a worker or in a thread of a pserver."""

    step: float
    request: float
    block: float
    row: float
    byte: float

    def seconds(self, traffic: StepTraffic, steps: float = 1.0) -> float:
        """Returns the CPU time of some traffic in seconds."""
        amounts = (steps, traffic.requests, traffic.blocks, traffic.rows, traffic.num_bytes)
        costs: tuple[float, ...] = msgspec.structs.astuple(self)
        return 1e-9 * sum(ns * amount for ns, amount in zip(costs, amounts, strict=True))


class Accuracy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ratios of the model's step to the measured one, over some measured cases."""

    num_cases: int
    lowest: float
    median: float
    highest: float
    median_factor: float
    """Half of the cases are off by at most this factor, up or down."""


class MeasuredOn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The runs that the coefficients come from."""

    commit: str
    date: str
    cpu: str
    cores: int
    max_workers: int
    max_pservers: int


class CostCoefficients(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All measured input of the model.

    Attributes:
        measured: Where the coefficients come from.
        worker_ns: A worker without its program.
        data_thread_ns: The data thread of a pserver, without the kernels below.
        io_threads_ns: The other threads of a pserver.
        pull_ns: Kernels that find and read a row: fixed part, and part per float of `dim`.
        push_ns: By update rule, kernels that find and update a row: fixed part, and part per float of `dim`.
        num_states: By update rule, number of optimizer states of `dim` floats.
        pserver_bytes: Memory of a pserver without tables.
        fitted: Accuracy over the cases that the coefficients are fitted to.
        held_out: Accuracy over the cases that neither coefficients nor formulas were chosen by.
    """

    measured: MeasuredOn
    worker_ns: CpuCost
    data_thread_ns: CpuCost
    io_threads_ns: CpuCost
    pull_ns: tuple[float, float]
    push_ns: dict[str, tuple[float, float]]
    num_states: dict[str, int]
    pserver_bytes: float
    fitted: Accuracy
    held_out: Accuracy

    def kernels_s(self, rule: str, dim: int) -> float:
        """Returns the CPU time of the kernels that pull a row and push it, in seconds."""
        return 1e-9 * sum(fixed + per_float * dim for fixed, per_float in (self.pull_ns, self.push_ns[rule]))


@lru_cache(maxsize=1)
def shipped_coefficients() -> CostCoefficients:
    """Returns the coefficients that come with the package."""
    return msgspec.json.decode(SHIPPED.read_bytes(), type=CostCoefficients)
