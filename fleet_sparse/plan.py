"""Plan: how many pservers a job needs, and what a step of it takes, from measured costs (`docs/scaling.md`).

It is a model. It knows no stragglers, no failures and no other traffic, and every pserver gets an equal share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from fleet_sparse.costs import Costs, Work
from fleet_sparse.errors import SettingError

SYNC, ASYNC = "sync", "async"
MODES = (SYNC, ASYNC)
MAX_PSERVERS = 16384
"""One for each bucket."""
MAX_DIM = 65535
MAX_COUNT = 10**15
"""Of anything; what is more is a slip."""
MAX_AMOUNT = 1e12

# Of docs/protocol.md.
HEADER_BYTES = 128
BLOCK_BYTES = 64
ID_BYTES = 8
FLOAT_BYTES = 4
MAX_FRAME_BYTES = 64 << 20

# Of the store.
CELL_BYTES = 16
NUM_SEGMENTS = 1024
FIRST_CLASS = 2
FIRST_LOAD, LOAD_STEP = 563 / 1024, 153 / (1 << 20)
MAX_BLOCK_DIM = 16
AHEAD_FROM_BYTES = 8 << 20
AHEAD_FRACTION = 32
MAX_AHEAD_BYTES = 64 << 20

WORTH_TWICE = 1.1
"""Pservers are added while twice as many would make a step shorter by more than this factor."""
_EXACT = 1e-6
_SHARPNESS = 5
"""Of what two bounds together come to; chosen for the jobs of `benchmarks/scale.py`."""
_AFTER_PUSH = 1 / 3
"""What of the cost of a step with nothing in it comes after its push; chosen for the same jobs."""


class Limit(StrEnum):
    """What keeps a job from being faster."""

    memory = "pserver memory"
    pserver_cpu = "pserver CPU"
    pserver_network = "pserver network"
    worker_network = "worker network"
    worker_compute = "worker compute"
    slowest_worker = "slowest worker"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained, and by how many workers.

    Attributes:
        rows: Of all tables.
        dim: Of each table.
        rule: Of the tables; one whose costs are known.
        tables: Among which rows and ids are spread evenly.
        fields: Ids of an example.
        batch: Examples of a worker's step.
        distinct: Share of the ids of a batch that are distinct, above 0, at most 1.
        dense: Dense values.
        workers: That train.
        compute_s: What a worker's program takes in a step with its rows in memory.
        spread: Standard deviation of that time, as a share of it. Sync waits for the slowest worker.
        mode: `"sync"` or `"async"`.
    """

    rows: float
    dim: int = 16
    rule: str = "adagrad"
    tables: int = 1
    fields: int = 26
    batch: int = 512
    distinct: float = 0.7
    dense: float = 0.0
    workers: int = 1
    compute_s: float = 0.0
    spread: float = 0.0
    mode: str = ASYNC

    @property
    def ids(self) -> float:
        """Ids of a worker's step."""
        return float(self.batch * self.fields)

    @property
    def distinct_ids(self) -> float:
        """Distinct ones of them."""
        return min(self.ids * self.distinct, self.rows)

    @property
    def pulls_dense(self) -> bool:
        """Whether new dense values come from the pservers; a worker that is alone computes them itself."""
        return self.dense > 0 and self.workers > 1

    @property
    def in_step(self) -> bool:
        """Whether workers take each step together."""
        return self.mode == SYNC and self.workers > 1

    @property
    def waits_for_push(self) -> bool:
        """Whether a worker goes on only when its push is applied."""
        return self.in_step or self.pulls_dense

    @property
    def dense_bytes(self) -> float:
        """Bytes of the dense values."""
        return FLOAT_BYTES * self.dense


class Machines(NamedTuple):
    """What pservers and workers run on.

    Attributes:
        memory_bytes: That a pserver may take.
        network_bits_per_s: Of each machine, in each direction, without the network's own headers.
        pservers_a_machine: Pservers that share its network.
        shared_cores: Cores, if all pservers and workers are on one machine; 0 if each has its own.
    """

    memory_bytes: float = 64e9
    network_bits_per_s: float = 25e9
    pservers_a_machine: int = 1
    shared_cores: int = 0

    def crowd(self, num_processes: int) -> float:
        """Share of the processes of a job that there are no cores for."""
        return max(1 - self.shared_cores / num_processes, 0.0) if self.shared_cores else 0.0


class Memory(NamedTuple):
    """Bytes of a pserver. What is backed ahead of its use is in those of cells and rows."""

    cells: float
    """Of the index."""
    rows: float
    """With their states."""
    notes: float
    dense: float
    staged: float
    """Sync of several workers: pushes that wait for their step to be complete."""
    process: float

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)


class Traffic(NamedTuple):
    """Bytes of one worker's step."""

    to_pservers: float
    from_pservers: float


class Cpu(NamedTuple):
    """Seconds of CPU of one worker's step."""

    client: float
    """Of the worker besides its program."""
    after_push: float
    """What of that comes between its push and its next pull."""
    data: float
    """Of the data thread of one pserver."""
    io: float
    """Of its other threads."""
    waited_io: float
    """What of that the worker waits for."""


class Times(NamedTuple):
    """Seconds of a step that each resource is needed, beside others or not; those of a pserver for all workers.

    Where workers take each step together they add up to it, but for those that go on `beside` the longer ones.
    """

    program: float
    slowest: float
    """Sync: how much longer the slowest worker's program takes."""
    client: float
    """CPU of the worker besides its program."""
    worker_network: float
    pserver_cpu: float
    """Of its data thread; where pservers share cores, until those have done the work of all of them."""
    pserver_io: float
    """Of its other threads, as far as it is waited for: in step by one worker after the other, else by each."""
    pserver_network: float
    """In step both directions, one after the other; else the larger."""

    def beside(self, job: Job) -> frozenset[str]:
        """Names of those that do not lengthen a step of workers in step: longer ones go on meanwhile."""
        if not job.in_step:
            return frozenset()
        one_by_one = self.worker_network + self.pserver_cpu + self.pserver_io
        if self.pserver_network > one_by_one:
            return frozenset({"worker_network", "pserver_cpu", "pserver_io"})
        return frozenset({"pserver_network"})

    def limit(self, job: Job) -> Limit:
        """The largest of what makes up the step."""
        pserver_cpu = self.pserver_cpu + self.pserver_io
        if not job.in_step:  # Where many wait for the data thread, nobody waits for the others too.
            pserver_cpu = max(self.pserver_cpu, self.pserver_cpu / job.workers + self.pserver_io)
        needed = {
            Limit.worker_compute: self.program + self.client,
            Limit.slowest_worker: self.slowest,
            Limit.worker_network: self.worker_network,
            Limit.pserver_cpu: pserver_cpu,
            Limit.pserver_network: self.pserver_network,
        }
        beside = {Limit[name] for name in self.beside(job) if name in Limit.__members__}
        return max((each for each in needed if each not in beside), key=needed.__getitem__)


class Plan(NamedTuple):
    """What a job takes on so many pservers."""

    job: Job
    machines: Machines
    num_pservers: int
    memory: Memory
    traffic: Traffic
    times: Times
    step_s: float
    least_pservers: int
    """That have the memory."""

    @property
    def fits(self) -> bool:
        """Whether a pserver's share fits into its memory."""
        return self.memory.total <= self.machines.memory_bytes

    @property
    def limit(self) -> Limit:
        """What keeps the job from being faster, or from running."""
        return self.times.limit(self.job) if self.fits else Limit.memory

    @property
    def num_machines(self) -> int:
        """Those that pservers run on."""
        return -(-self.num_pservers // self.machines.pservers_a_machine)

    @property
    def examples_per_s(self) -> float:
        """Of all workers."""
        return self.job.workers * self.job.batch / self.step_s

    @property
    def worker_bits_per_s(self) -> tuple[float, float]:
        """What a worker takes in and gives out."""
        return 8 * self.traffic.from_pservers / self.step_s, 8 * self.traffic.to_pservers / self.step_s

    @property
    def pserver_bits_per_s(self) -> tuple[float, float]:
        """What a pserver takes in and gives out."""
        share = self.job.workers / self.num_pservers
        taken, given = self.worker_bits_per_s
        return given * share, taken * share


def plan(job: Job, machines: Machines, costs: Costs, num_pservers: int | None = None) -> Plan:
    """What the job takes on so many pservers; if they are not given, on as many as are worth it.

    These are the fewest that have the memory, or as many more, by a tenth at a time, as it takes until twice as many
    would be faster by less than `WORTH_TWICE`.

    Raises:
        SettingError: A number has no meaning, or no number of pservers has the memory.
    """
    _check(job, machines, costs, num_pservers)
    least = least_pservers(job, machines, costs)
    if num_pservers is not None:
        return plan_on(job, machines, costs, num_pservers, least)

    def is_enough(count: int) -> bool:
        one, twice = (plan_on(job, machines, costs, number) for number in (count, min(2 * count, MAX_PSERVERS)))
        return one.step_s <= WORTH_TWICE * twice.step_s

    return plan_on(job, machines, costs, next(filter(is_enough, counts_from(least))), least)


def plan_on(job: Job, machines: Machines, costs: Costs, num_pservers: int, least: int = 1) -> Plan:
    """The plan for so many pservers; all numbers have been checked."""
    traffic = traffic_of(job, num_pservers)
    times, step_s = times_of(job, machines, num_pservers, cpu_of(job, machines, costs, num_pservers))
    shorter_s = 0.0
    while step_s > shorter_s * (1 + _EXACT):  # the longer a step, the longer its threads are idle, the colder they are
        shorter_s = step_s
        times, step_s = times_of(job, machines, num_pservers, cpu_of(job, machines, costs, num_pservers, shorter_s))
    memory = memory_of(job, costs, num_pservers)
    return Plan(job, machines, num_pservers, memory, traffic, times, step_s, least)


def counts_from(least: int, most: int = MAX_PSERVERS) -> list[int]:
    """Numbers of pservers from `least` to `most`, each a tenth above the one before."""
    counts = [least]
    while counts[-1] < most:
        counts.append(min(max(counts[-1] + 1, math.ceil(counts[-1] * 1.1)), most))
    return counts


# Memory


def index_bytes(rows: float) -> float:
    """Of the index of a table with so many rows on one pserver.

    Segments double one after the other while the rows go from 0.55 to 0.70 of the cells that there were: so 35 to 55 %
    of the cells are in use.
    """
    size_class, grown = FIRST_CLASS, 0
    while (grown := _num_grown(rows, size_class)) == NUM_SEGMENTS:
        size_class += 1
    return CELL_BYTES * (NUM_SEGMENTS + grown) * 2.0**size_class


def store_bytes(rows: float, dim: int, num_states: int) -> tuple[float, float, float]:
    """Index, rows with states, and notes of so many rows of a table on one pserver; the table counts no days."""
    row_bytes, state_bytes = FLOAT_BYTES * dim * rows, FLOAT_BYTES * dim * num_states * rows
    arrays = [row_bytes + state_bytes] if dim <= MAX_BLOCK_DIM else [row_bytes, state_bytes]
    notes = 2.0 ** math.ceil(math.log2(max(rows, NUM_SEGMENTS))) / 8
    return _backed(index_bytes(rows)), sum(map(_backed, arrays)), notes


def memory_of(job: Job, costs: Costs, num_pservers: int) -> Memory:
    """Of one pserver."""
    num_states = costs.num_states[job.rule]
    index, rows, notes = store_bytes(job.rows / job.tables / num_pservers, job.dim, num_states)
    dense = job.dense_bytes * (1 + num_states) / num_pservers
    staged = 0.0
    if job.in_step:
        staged = job.workers * (job.distinct_ids * (ID_BYTES + FLOAT_BYTES * job.dim) + job.dense_bytes) / num_pservers
    return Memory(job.tables * index, job.tables * rows, job.tables * notes, dense, staged, costs.pserver_bytes)


def least_pservers(job: Job, machines: Machines, costs: Costs) -> int:
    """The fewest pservers whose memory holds their shares.

    Raises:
        SettingError: There is no such number.
    """

    def fits(count: int) -> bool:
        return memory_of(job, costs, count).total <= machines.memory_bytes

    if not fits(MAX_PSERVERS):
        needed = memory_of(job, costs, MAX_PSERVERS).total
        raise SettingError(
            f"plan: --memory-gb is {machines.memory_bytes / 1e9:g}, should be at least {math.ceil(needed / 1e9)} for "
            f"{MAX_PSERVERS} pservers, the most that there may be. Give pservers more memory, or take fewer rows or a "
            "smaller dim"
        )
    low, high = 0, MAX_PSERVERS  # of these high fits
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


# The wire


def frame_bytes(blocks: float, ids: float, values: float) -> float:
    """Of a frame with so many blocks, ids and float values."""
    return HEADER_BYTES + BLOCK_BYTES * blocks + ID_BYTES * ids + FLOAT_BYTES * values


def traffic_of(job: Job, num_pservers: int) -> Traffic:
    """Of one worker's step: a pull of the distinct ids, and a push with their gradients and the dense ones."""
    requests, pull_blocks, push_blocks = _requests(job, num_pservers)
    dense_pushed, dense_pulled = _dense_blocks(job, num_pservers)
    headers, row_bytes = HEADER_BYTES * requests, FLOAT_BYTES * job.dim * job.distinct_ids
    to_pservers = headers + BLOCK_BYTES * (pull_blocks + push_blocks + dense_pushed + dense_pulled)
    to_pservers += 2 * ID_BYTES * job.distinct_ids + row_bytes + job.dense_bytes
    from_pservers = headers + BLOCK_BYTES * (pull_blocks + dense_pulled) + row_bytes
    from_pservers += job.dense_bytes if job.pulls_dense else 0.0
    return Traffic(to_pservers, from_pservers)


def work_of(job: Job, num_pservers: int) -> Work:
    """Of one worker's step, at all pservers together; ids and steps are the worker's own."""
    requests, pull_blocks, push_blocks = _requests(job, num_pservers)
    rows = 2 * job.distinct_ids
    return Work(
        steps=1,
        requests=requests,
        blocks=pull_blocks + push_blocks + sum(_dense_blocks(job, num_pservers)),
        ids=job.ids,
        rows=rows,
        row_bytes=FLOAT_BYTES * job.dim * rows,
        dense_bytes=(2 if job.pulls_dense else 1) * job.dense_bytes,
        replica_bytes=job.dense_bytes if job.workers == 1 else 0.0,
    )


# Time


def waiting_s(workers: int, away_s: float, service_s: float) -> float:
    """How long a worker is at a pserver that serves one after the other, in a closed circle of equal workers.

    Bard and Schweitzer's approximation of mean value analysis, for services of equal length: who comes finds the others
    as they are on average, and the one that is served half done. With one worker it is `service_s`; never less than
    `workers * service_s - away_s`, which it is with many.

    Args:
        workers: How many.
        away_s: Between an answer and the next request.
        service_s: Of one request.
    """
    excess = workers * service_s - away_s
    rest = excess - service_s
    return max((excess + math.sqrt(rest * rest + service_s * (2 * away_s + service_s))) / 2, excess)


def cpu_of(job: Job, machines: Machines, costs: Costs, num_pservers: int, step_s: float = 0.0) -> Cpu:
    """Of one worker's step, which takes `step_s`; without it as if no thread were ever idle."""
    work = work_of(job, num_pservers)
    share = Work(*(amount / num_pservers for amount in work))._replace(steps=0, ids=0, replica_bytes=0)
    prices, crowd = costs.prices[job.mode], machines.crowd(job.workers + num_pservers)
    kernels = share.rows / 2 * costs.kernel_s(job.rule, job.dim, job.rows / num_pservers)
    client, data, io = prices.worker.seconds(work), prices.data_thread.seconds(share), prices.io_thread.seconds(share)
    after_push = prices.worker.seconds(Work(steps=_AFTER_PUSH, ids=work.ids, replica_bytes=work.replica_bytes))
    slowdown = costs.slowdown(client, step_s, crowd=crowd)
    data, io = (busy * costs.slowdown(busy, step_s, job.workers, crowd) for busy in (data + kernels, io))
    waited_io = costs.io_share * (io if job.waits_for_push else io / 2)
    return Cpu(slowdown * client, slowdown * after_push, data, io, waited_io)


def times_of(job: Job, machines: Machines, num_pservers: int, cpu: Cpu) -> tuple[Times, float]:
    """What each resource is needed for, and the seconds of a step."""
    traffic = traffic_of(job, num_pservers)
    bytes_per_s = machines.network_bits_per_s / 8
    worker_network = sum(traffic) / bytes_per_s
    of_machine = min(machines.pservers_a_machine / num_pservers, 1.0)
    of_pserver = [of_machine * num_bytes / bytes_per_s for num_bytes in traffic]

    data, waited_io = cpu.data, cpu.waited_io
    if machines.shared_cores:  # Pservers are done when the cores have done the work of them all.
        data = max(data, num_pservers * (cpu.data + cpu.io) / machines.shared_cores - waited_io)
    own, slowest = job.compute_s + cpu.client, 0.0
    if job.in_step:
        # All workers are in the same part of the step: what a pserver does for one goes on beside no other.
        slowest = job.compute_s * job.spread * math.sqrt(2 * math.log(job.workers))
        io, network = job.workers * waited_io, job.workers * sum(of_pserver)
        step = own + slowest + max(worker_network + job.workers * data + io, network)
    else:
        service, io, network = max(data, *of_pserver), waited_io, job.workers * max(of_pserver)
        away = own + worker_network + waited_io
        if not job.waits_for_push:  # Half of the data thread's work is the push.
            away -= min(cpu.after_push, data / 2)
        if service > data:  # The same bytes cross both networks at a time.
            away += data - min(service, worker_network)
        step = away + waiting_s(job.workers, away, service)
    if machines.shared_cores:
        of_all = job.workers * (own + num_pservers * (cpu.data + cpu.io)) / machines.shared_cores
        step = max(step, of_all) if job.workers == 1 else _nearly_both(step, of_all)
    return Times(job.compute_s, slowest, cpu.client, worker_network, job.workers * data, io, network), step


def distinct_of_zipf(draws: float, ranks: float, exponent: float) -> float:
    """How many distinct ids so many draws have, if the id of rank i comes with a probability like i ** -exponent.

    Sums over ranks, one by one at first, then by the trapezoid rule over their logarithms.
    """
    edges = _edges(ranks)
    mass = sum(width * rank**-exponent for rank, width in edges)
    return sum(width * -math.expm1(-draws * rank**-exponent / mass) for rank, width in edges)


def _edges(ranks: float) -> list[tuple[float, float]]:
    """Ranks, and how many ranks each stands for."""
    one_by_one = int(min(ranks, 1000))
    edges = [(float(rank), 1.0) for rank in range(1, one_by_one + 1)]
    low = one_by_one + 0.5
    while low < ranks:
        high = min(low * 1.02, ranks + 0.5)
        edges.append((math.sqrt(low * high), high - low))
        low = high
    return edges


def _num_grown(rows: float, size_class: int) -> int:
    """Segments that have left the class, if none did before the rows were enough for it."""
    load = rows / (NUM_SEGMENTS * 2.0**size_class)
    return min(max(math.ceil((load - FIRST_LOAD) / LOAD_STEP), 0), NUM_SEGMENTS)


def _backed(num_bytes: float) -> float:
    """With what is backed ahead of its use."""
    ahead = min(num_bytes / AHEAD_FRACTION, MAX_AHEAD_BYTES) if num_bytes >= AHEAD_FROM_BYTES else 0.0
    return num_bytes + ahead


def _requests(job: Job, num_pservers: int) -> tuple[float, float, float]:
    """Of one worker's step: frames to all pservers, blocks of tables in pulls, and in pushes.

    In async without dense values a pserver is asked only if it owns an id of the step; a table has a block only then.
    """
    asked = num_pservers * _hit(num_pservers, job.distinct_ids)
    pull_blocks = job.tables * num_pservers * _hit(num_pservers, job.distinct_ids / job.tables)
    push_blocks, to_pull, to_push = pull_blocks, asked, asked
    if job.mode == SYNC:
        push_blocks, to_pull, to_push = float(job.tables * num_pservers), float(num_pservers), float(num_pservers)
    elif job.dense:
        to_push = float(num_pservers)
    row_bytes = job.distinct_ids * (ID_BYTES + FLOAT_BYTES * job.dim)
    return (
        max(to_pull, math.ceil(row_bytes / MAX_FRAME_BYTES)) + max(to_push, math.ceil(row_bytes / MAX_FRAME_BYTES)),
        pull_blocks,
        push_blocks,
    )


def _dense_blocks(job: Job, num_pservers: int) -> tuple[int, int]:
    """Of one worker's step: pushed, and pulled."""
    pushed = num_pservers if job.dense else 0
    return pushed, pushed if job.pulls_dense else 0


def _nearly_both(path_s: float, cores_s: float) -> float:
    """What takes at least both: the longer of them if the other one is much shorter, and more where both are near."""
    longer, shorter = max(path_s, cores_s), min(path_s, cores_s)
    return longer * math.pow(1 + math.pow(shorter / longer, _SHARPNESS), 1 / _SHARPNESS)


def _hit(num_pservers: int, num_ids: float) -> float:
    """Probability that a pserver owns one of so many ids."""
    return 1.0 if num_pservers == 1 else -math.expm1(num_ids * math.log1p(-1 / num_pservers))


def _check(job: Job, machines: Machines, costs: Costs, num_pservers: int | None) -> None:
    """Raises `SettingError` for the first number without meaning, by the name and in the unit of its option."""
    if job.rule not in costs.push_ns:
        raise SettingError(f"plan: --optimizer is {job.rule!r}, should be one of {', '.join(costs.rules)}")
    if job.mode not in MODES:
        raise SettingError(f"plan: --mode is {job.mode!r}, should be one of {', '.join(MODES)}; geo was not measured")
    most = {"--dim": MAX_DIM, "--pservers": MAX_PSERVERS}
    counts = {"--rows": job.rows, "--dim": job.dim, "--tables": job.tables, "--fields": job.fields}
    counts |= {"--batch": job.batch, "--workers": job.workers, "pservers a machine": machines.pservers_a_machine}
    if num_pservers is not None:
        counts["--pservers"] = num_pservers
    for name, value in counts.items():
        if not 1 <= value <= most.get(name, MAX_COUNT):
            raise SettingError(f"plan: {name} is {value:g}, should be 1 to {most.get(name, MAX_COUNT):g}")
    if machines.shared_cores < 0:
        raise SettingError(f"plan: shared cores are {machines.shared_cores}, should be 0 or more")
    if job.tables > job.rows:
        raise SettingError(f"plan: --tables is {job.tables}, should be at most --rows, which is {job.rows:g}")
    if not 0 < job.distinct <= 1:
        raise SettingError(f"plan: --distinct is {job.distinct:g}, should be a share of the ids, above 0 and at most 1")
    amounts = {"--dense": job.dense, "--compute-ms": 1e3 * job.compute_s, "--spread": job.spread}
    for name, value in amounts.items():
        if not 0 <= value <= MAX_AMOUNT:
            raise SettingError(f"plan: {name} is {value:g}, should be 0 to {MAX_AMOUNT:g}")
    of_machines = {"--memory-gb": machines.memory_bytes, "--network-gbit": machines.network_bits_per_s}
    for name, value in of_machines.items():
        if not 0 < value < math.inf:
            raise SettingError(f"plan: {name} is {value / 1e9:g}, should be above 0, and finite")
