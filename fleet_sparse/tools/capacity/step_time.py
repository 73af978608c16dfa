"""Time of a step, as a sum and a maximum of CPU, network and latency."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import NamedTuple

from .cache_cost import cache_cost
from .coefficients import CostCoefficients
from .job import Machines, PlannedJob
from .traffic import traffic_of


class Limit(StrEnum):
    """The resource that a job waits for most."""

    memory = "pserver memory"
    pserver_cpu = "pserver CPU"
    pserver_network = "pserver network"
    worker_network = "worker network"
    latency = "network latency"
    worker_compute = "worker compute"
    slowest_worker = "slowest worker"


class Times(NamedTuple):
    """Seconds of one step that each resource is busy; those of a pserver are for all workers."""

    program: float
    slowest: float
    """Sync: delay of the slowest worker's program."""
    client: float
    """CPU of the worker besides its program."""
    latency: float
    worker_network: float
    pserver_cpu: float
    """CPU of the data thread."""
    pserver_io: float
    """CPU of the other threads, which run in parallel with it."""
    pserver_network: float
    """Time on its network: in step the sum of both directions, otherwise the longer one."""


def times_of(job: PlannedJob, machines: Machines, coefficients: CostCoefficients, num_pservers: int) -> Times:
    """Returns the terms of a step."""
    traffic, workers = traffic_of(job, num_pservers), job.workers
    of_cache = cache_cost(job, num_pservers)
    tables_s = traffic.rows * coefficients.kernels_s(job.rule, job.dim) + of_cache.pservers_s
    bytes_per_s = machines.network_bits_per_s / 8
    shared = min(machines.pservers_per_machine / num_pservers, 1.0)
    bytes_per_pserver = traffic.num_bytes if job.is_in_step else max(traffic.to_pservers, traffic.from_pservers)
    return Times(
        program=job.compute_s,
        slowest=job.compute_s * job.spread * math.sqrt(2 * math.log(workers)) if job.is_in_step else 0.0,
        client=coefficients.worker_ns.seconds(traffic) + of_cache.worker_s,
        latency=machines.round_trip_s * (2 if job.waits_for_push else 1),
        worker_network=traffic.num_bytes / bytes_per_s,
        pserver_cpu=workers * (coefficients.data_thread_ns.seconds(traffic, steps=0) + tables_s) / num_pservers,
        pserver_io=workers * coefficients.io_threads_ns.seconds(traffic, steps=0) / num_pservers,
        pserver_network=workers * shared * bytes_per_pserver / bytes_per_s,
    )


def step_s_of(job: PlannedJob, machines: Machines, times: Times, num_pservers: int) -> float:
    """Returns the time of a step in seconds.

    It is the path of one worker, or the busiest resource of a pserver if that takes longer. Workers in step wait for
    the pservers' work for all of them; others only for their own.
    """
    return max(sum(terms.values()) for terms in _bounds(job, machines, times, num_pservers))


def limit_of(job: PlannedJob, machines: Machines, times: Times, num_pservers: int) -> Limit:
    """Returns the largest term of what a step takes as long as: of a worker's path, or a resource of a pserver."""
    terms = max(_bounds(job, machines, times, num_pservers), key=lambda terms: sum(terms.values()))
    return max(terms, key=terms.__getitem__)


def _bounds(job: PlannedJob, machines: Machines, times: Times, num_pservers: int) -> list[dict[Limit, float]]:
    """Returns the terms, in seconds, of all sums that a step is no shorter than; the longest one is its time."""
    path = {
        Limit.worker_compute: times.program + times.client,
        Limit.slowest_worker: times.slowest,
        Limit.latency: times.latency,
    }
    if not job.is_in_step:
        path |= {Limit.worker_network: times.worker_network, Limit.pserver_cpu: times.pserver_cpu / job.workers}
    elif times.pserver_network > times.worker_network + times.pserver_cpu:  # they run in parallel
        path |= {Limit.pserver_network: times.pserver_network}
    else:
        path |= {Limit.worker_network: times.worker_network, Limit.pserver_cpu: times.pserver_cpu}
    pserver_cpu_s = max(times.pserver_cpu, times.pserver_io)
    bounds = [path, {Limit.pserver_cpu: pserver_cpu_s}, {Limit.pserver_network: times.pserver_network}]
    if machines.shared_cores:
        cpu = {
            Limit.worker_compute: job.workers * (times.program + times.client),
            Limit.pserver_cpu: num_pservers * (times.pserver_cpu + times.pserver_io),
        }
        bounds.append({limit: seconds / machines.shared_cores for limit, seconds in cpu.items()})
    return bounds
