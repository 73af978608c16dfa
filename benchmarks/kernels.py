"""How close does each kernel come to what the memory allows?

`python -m benchmarks.kernels` from the root of a checkout. Batches of 13 000 ids or rows, drawn again for each call,
over 1 M and 20 M rows of dim 8, 16, 64 and 128; fewer rows where the memory that `--gigabytes` allows does not hold
as many.

The limit is the same loop, with the same prefetching, that only reads one float of each cache line that the kernel has
to touch: of the index for `find` and `insert`, of the row for `gather`, of the row and its state for a rule. It reads
the same mapping in the same run, interleaved with the kernel. `dedup` and `merge` work in the caches; `merge` has a
memcpy of its gradients as a baseline. `find, lease and touch` is a hit of a worker's row cache, of distinct ids that
are drawn uniformly or by Zipf's law; its baseline is the search alone. NumPy does the same where it can: searchsorted
on sorted ids, unique, add.at, and fancy indices, with the formula of a rule. Every kernel is checked before it is
measured.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.baselines import zipf
from benchmarks.lines import read_lines
from benchmarks.options import AT_LEAST_1, DIM, amount, check_batch
from benchmarks.record import Record, add_results
from fleet_sparse.core.cache_index import CacheIndex
from fleet_sparse.core.cache_policies import AGED_LFU, ALL
from fleet_sparse.core.ids import hash_ids
from fleet_sparse.core.initializer import initial_scalars, uniform
from fleet_sparse.core.kernels_batch import dedup_scratch, dedup_split, segment_sum
from fleet_sparse.core.kernels_index import find, find_or_create, hash_each
from fleet_sparse.core.kernels_rows import gather
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.rules import RULES, UpdateRule
from fleet_sparse.pserver.storage.id_index import IdIndex
from fleet_sparse.pserver.storage.table_store import MAX_BLOCK_DIM
from fleet_sparse.pserver.storage.virtual_memory import Populator, ReservedMemory
from fleet_sparse.warm_up import warm_up

OURS, LIMIT, NUMPY, MEMCPY, FIND = "ours", "limit", "NumPy", "memcpy", "find"
NUM_IDS, NUM_FIELDS = 13_312, 26
SALT, SEED = 0x5EED, 1
FLOAT_BYTES, CELL_FLOATS, LINE_FLOATS = 4, 4, 16
FILL, LEARNING_RATE = 0.01, 0.05
INSERT_BATCH = 50_000
NUM_CACHED, CACHED_STEPS, ZIPF_EXPONENT, NUM_BATCHES = 1_000_000, 1 << 20, 1.05, 64
HIT = "find, lease and touch"
MOST_GIGABYTES = 12.0

Run = Callable[[], Any]


class Case(NamedTuple):
    """A kernel over one table. Each of `runs` prepares a call and returns it; only the call is timed."""

    kernel: str
    num_rows: int
    dim: int
    batch: int
    runs: dict[str, Callable[[], Run]]


class Layout(NamedTuple):
    """Rows and states as a store lays them out, in one piece of memory."""

    rows: NDArray[np.float32]
    row_stride: int
    states: NDArray[np.float32]
    state_stride: int
    state_offset: int
    state_width: int
    num_rows: int


class Index:
    """An index of many ids; id `number` is `ids_of([number])`, and its row has that number.

    Attributes:
        num_rows: Number of rows.
    """

    def __init__(self, num_rows: int) -> None:
        self._index = IdIndex(SALT, huge_pages=True)
        self._memory = ReservedMemory(huge_pages=True)  # rows of dim 1, which are never read
        self._populator = Populator([self._index.memory])  # backs memory before segments grow into it, as in a store
        self._row_indices = np.empty(INSERT_BATCH, np.int64)
        self._initial = initial_scalars(uniform(-0.01, 0.01), seed=SEED, salt=SALT)
        self.num_rows = 0
        while self.num_rows < num_rows:
            self.insert(self.fresh(min(INSERT_BATCH, num_rows - self.num_rows)))()

    def fresh(self, count: int) -> NDArray[np.int64]:
        """Returns the next ids without a row."""
        return ids_of(np.arange(self.num_rows, self.num_rows + count))

    def insert(self, ids: NDArray[np.int64]) -> Run:
        """Creates rows of the ids."""
        rows, index, out = self._memory.array(np.float32), self._index, self._row_indices[: len(ids)]
        initial_state = np.empty(0, np.float32)

        def run() -> None:
            hash_each(ids, index.salt, out)
            num_done = find_or_create(
                index.cells,
                index.classes,
                index.num_used,
                index.growth,
                index.salt,
                ids,
                out,
                out,
                rows,
                1,
                rows,
                1,
                0,
                1,
                *self._initial,
                initial_state,
            )
            index.slide()
            self._populator.wake_if_needed()
            if num_done < len(ids):
                raise SystemExit("the index has no room")
            self.num_rows = index.num_rows

        return run

    def find(self, ids: NDArray[np.int64], out: NDArray[np.int64]) -> Run:
        """Writes the row numbers of the ids to `out`."""
        index = self._index
        return lambda: find(index.cells, index.classes, index.salt, ids, out)

    def read_cells(self, rng: np.random.Generator, count: int) -> Run:
        """Reads the cache lines of random cells in use."""
        cells, sums = self._index.cells.view(np.float32), np.empty(count, np.float32)
        segments = rng.integers(len(self._index.classes), size=count)
        classes = self._index.classes[segments].astype(np.int64)
        at = ((len(self._index.classes) + segments) << classes) + (rng.random(count) * (1 << classes)).astype(np.int64)
        return lambda: read_lines(cells, CELL_FLOATS, cells, CELL_FLOATS, 0, at, CELL_FLOATS, 0, sums)

    def close(self) -> None:
        """Frees the memory."""
        self._populator.stop()
        self._index.close()
        self._memory.close()


def ids_of(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns distinct ids over the whole range of int64."""
    return hash_ids(numbers, 0).view(np.int64)


def laid_out(memory: NDArray[np.float32], rule: UpdateRule, num_rows: int, dim: int) -> Layout:
    """Returns a table of that many rows, or as many as fit; all values are `FILL`."""
    state_width = rule.num_states * dim
    room = len(memory) - 2 * LINE_FLOATS
    num_rows = min(num_rows, room // (dim + state_width))
    if state_width and dim > MAX_BLOCK_DIM:
        begin = num_rows * dim
        layout = Layout(memory[:begin], dim, memory[begin:room], state_width, 0, state_width, num_rows)
    else:
        layout = Layout(memory, dim + state_width, memory, dim + state_width, dim, state_width, num_rows)
    memory[: num_rows * (dim + state_width)] = FILL
    return layout


def of_index(index: Index, batch: int, rng: np.random.Generator) -> Iterator[Case]:
    """Yields the cases `find` and `insert`."""
    num_rows, out = index.num_rows, np.empty(batch, np.int64)
    by_value = ids_of(np.arange(num_rows))
    order = np.argsort(by_value)
    by_value = by_value[order]

    def present() -> NDArray[np.int64]:
        return ids_of(rng.integers(num_rows, size=batch))

    def sorted_ids() -> Run:
        ids = present()
        return lambda: order[np.searchsorted(by_value, ids)]

    numbers = rng.integers(num_rows, size=batch)
    index.find(ids_of(numbers), out)()
    check("find", out, numbers)
    index.find(index.fresh(batch), out)()
    check("find of absent ids", out, np.full(batch, -1))
    runs = {
        OURS: lambda: index.find(present(), out),
        LIMIT: lambda: index.read_cells(rng, batch),
        NUMPY: sorted_ids,
    }
    yield Case("find", num_rows, 0, batch, runs)
    runs = {OURS: lambda: index.insert(index.fresh(batch)), LIMIT: lambda: index.read_cells(rng, batch)}
    yield Case("insert", num_rows, 0, batch, runs)
    index.find(ids_of(np.arange(index.num_rows - batch, index.num_rows)), out)()
    check("insert", out, np.arange(index.num_rows - batch, index.num_rows))


def of_cache(num_rows: int, batch: int, rng: np.random.Generator) -> Iterator[Case]:
    """Yields the cases of hits in a row cache that has so many rows, a third of them without a lease."""
    index = CacheIndex(num_rows, SALT, AGED_LFU, ALL)
    for begin in range(0, num_rows, INSERT_BATCH):
        ids = ids_of(np.arange(begin, min(begin + INSERT_BATCH, num_rows)))
        index.use(ids, 0)
        index.replace(ids, index.choose(ids), CACHED_STEPS)
    index.lease(np.arange(0, num_rows, 3), np.zeros(-(-num_rows // 3), np.int64))
    weights = np.arange(1, num_rows + 1) ** -ZIPF_EXPONENT
    sums, by_rank = np.cumsum(weights) / weights.sum(), rng.permutation(num_rows)

    def uniform_numbers() -> NDArray[np.int64]:
        return np.unique(rng.integers(num_rows, size=batch + batch // 8))

    def zipf_numbers() -> NDArray[np.int64]:
        return np.unique(by_rank[np.minimum(np.searchsorted(sums, rng.random(4 * batch)), num_rows - 1)])

    for name, draw in (("uniform", uniform_numbers), ("Zipf", zipf_numbers)):
        # Drawn ahead, because drawing by Zipf's law empties the CPU caches.
        batches = [rng.permutation(draw())[:batch] for _ in range(NUM_BATCHES)]
        ids_ahead = cycle([ids_of(numbers) for numbers in batches])
        uses = index.use(ids_of(batches[0]), 1)
        check("hits", uses.slots, batches[0])
        check("leases", uses.unleased, np.flatnonzero(batches[0] % 3 == 0))

        def hits(ids_ahead: Iterator[NDArray[np.int64]] = ids_ahead) -> Run:
            ids = next(ids_ahead)
            return lambda: index.use(ids, 1)

        def found(ids_ahead: Iterator[NDArray[np.int64]] = ids_ahead) -> Run:
            ids = next(ids_ahead)
            return lambda: index.find(ids)

        yield Case(f"{HIT}, {name}", num_rows, 0, min(map(len, batches)), {OURS: hits, FIND: found})


def of_rows(
    index: Index, memory: NDArray[np.float32], num_rows: int, dim: int, batch: int, rng: np.random.Generator
) -> Iterator[Case]:
    """Yields the cases `gather`, and `find` followed by `gather`, with Adagrad's state next to the rows."""
    layout = laid_out(memory, RULES["adagrad"], num_rows, dim)
    found, out, sums = np.empty(batch, np.int64), np.empty(batch * dim, np.float32), np.empty(batch, np.float32)
    as_taken = layout.rows[: layout.num_rows * layout.row_stride].reshape(-1, layout.row_stride)[:, :dim]

    def drawn() -> NDArray[np.int64]:
        return rng.integers(layout.num_rows, size=batch)

    def gathered(numbers: NDArray[np.int64]) -> Run:
        return lambda: gather(layout.rows, layout.row_stride, 0, numbers, dim, out)

    def read(numbers: NDArray[np.int64]) -> Run:
        return lambda: read_lines(layout.rows, layout.row_stride, layout.rows, 0, 0, numbers, dim, 0, sums)

    def taken() -> Run:
        numbers = drawn()
        return lambda: as_taken[numbers]

    def found_and_gathered() -> Run:
        ids = ids_of(drawn())

        def run() -> None:
            index.find(ids, found)()
            gathered(found)()

        return run

    def both_read() -> Run:
        cells, rows = index.read_cells(rng, batch), read(drawn())

        def run() -> None:
            cells()
            rows()

        return run

    numbers = drawn()
    as_taken[numbers] = numbers[:, None] % 1000
    gathered(numbers)()
    check("gather", out.reshape(batch, dim), as_taken[numbers])
    runs = {OURS: lambda: gathered(drawn()), LIMIT: lambda: read(drawn()), NUMPY: taken}
    yield Case("gather", layout.num_rows, dim, batch, runs)
    runs = {OURS: found_and_gathered, LIMIT: both_read}
    yield Case("find and gather", layout.num_rows, dim, batch, runs)


def of_rule(
    rule: UpdateRule, memory: NDArray[np.float32], num_rows: int, dim: int, batch: int, rng: np.random.Generator
) -> Case:
    """Returns the case of a rule's update of one batch of rows."""
    layout = laid_out(memory, rule, num_rows, dim)
    grads = rng.standard_normal(batch * dim).astype(np.float32)
    sums = np.empty(batch, np.float32)
    scalars = rule.scalars(dict(rule.defaults), LEARNING_RATE, 1)
    apply = rule.kernel
    assert apply is not None
    rows = layout.rows[: layout.num_rows * layout.row_stride].reshape(layout.num_rows, -1)[:, :dim]
    states = layout.states[: layout.num_rows * layout.state_stride].reshape(layout.num_rows, -1)
    states = states[:, layout.state_offset : layout.state_offset + layout.state_width]

    def drawn() -> NDArray[np.int64]:
        return rng.integers(layout.num_rows, size=batch)

    def applied(numbers: NDArray[np.int64]) -> Run:
        return lambda: apply(*layout[:5], numbers, grads, dim, scalars)

    def read() -> Run:
        numbers = drawn()
        return lambda: read_lines(*layout[:5], numbers, dim, layout.state_width, sums)

    def by_numpy(numbers: NDArray[np.int64]) -> Run:
        return lambda: NUMPY_RULES[rule.name](rows, states, numbers, grads.reshape(batch, dim), scalars)

    numbers = rng.choice(layout.num_rows, batch, replace=False)
    others = np.setdiff1d(drawn(), numbers)
    runs: dict[str, Callable[[], Run]] = {OURS: lambda: applied(drawn()), LIMIT: read}
    if rule.name in NUMPY_RULES:
        runs[NUMPY] = lambda: by_numpy(drawn())
        before = rows[numbers].copy(), states[numbers].copy()
        by_numpy(numbers)()
        expected = rows[numbers].copy()
        rows[numbers], states[numbers] = before
        applied(numbers)()
        check(rule.name, np.abs(rows[numbers] - expected) < 1e-5, True)
    else:
        applied(numbers)()
        check(f"{rule.name}: pushed rows change", (rows[numbers] != np.float32(FILL)).any(axis=1), True)
    check(f"{rule.name}: others do not", rows[others], np.float32(FILL))
    return Case(rule.name, layout.num_rows, dim, batch, runs)


def numpy_sgd(rows: Any, states: Any, numbers: Any, grads: Any, scalars: Any) -> None:
    """With fancy indices."""
    rows[numbers] -= scalars[0] * grads


def numpy_adagrad(rows: Any, states: Any, numbers: Any, grads: Any, scalars: Any) -> None:
    """With fancy indices."""
    moments = states[numbers] + grads * grads
    states[numbers] = moments
    rows[numbers] -= scalars[0] * grads / (np.sqrt(moments) + scalars[1])


NUMPY_RULES: dict[str, Callable[..., None]] = {"sgd": numpy_sgd, "adagrad": numpy_adagrad}


def of_batch(dims: Sequence[int], rng: np.random.Generator) -> Iterator[Case]:
    """Yields the cases `dedup`, on one shard, and `merge`: the sum of the gradients of each distinct id."""
    ranks = zipf.sampler()(rng, (NUM_IDS // NUM_FIELDS, NUM_FIELDS))
    ids = (ranks * NUM_FIELDS + np.arange(NUM_FIELDS)).reshape(-1).astype(np.int64)
    unique, inverse, counts = np.empty(NUM_IDS, np.int64), np.empty(NUM_IDS, np.int64), np.empty(1, np.int64)
    placement, scratch = Placement.even(1), dedup_scratch(NUM_IDS)

    def dedup() -> int:
        return dedup_split(ids, np.uint64(SALT), placement.shard_of_bucket, 1, unique, inverse, counts, *scratch)

    num_unique = dedup()
    check("dedup", unique[inverse], ids)
    check("dedup: as many as there are", num_unique, len(np.unique(ids)))
    runs: dict[str, Callable[[], Run]] = {
        OURS: lambda: dedup,
        NUMPY: lambda: lambda: np.unique(ids, return_inverse=True),
    }
    yield Case("dedup", num_unique, 0, NUM_IDS, runs)
    for dim in dims:
        yield of_merge(inverse, num_unique, dim, rng)


def of_merge(inverse: NDArray[np.int64], num_unique: int, dim: int, rng: np.random.Generator) -> Case:
    """Returns the case `merge` of gradients of one dim."""
    grads, out = rng.standard_normal((NUM_IDS, dim)).astype(np.float32), np.empty((num_unique, dim), np.float32)
    target = np.empty_like(grads)

    def by_numpy() -> None:
        out.fill(0)
        np.add.at(out, inverse, grads)

    def merge() -> None:
        segment_sum(grads.reshape(-1), inverse, dim, out.reshape(-1))

    by_numpy()
    expected = out.copy()
    merge()
    check("merge", np.isclose(out, expected, atol=1e-3), True)
    runs: dict[str, Callable[[], Run]] = {
        OURS: lambda: merge,
        MEMCPY: lambda: lambda: np.copyto(target, grads),
        NUMPY: lambda: by_numpy,
    }
    return Case("merge", num_unique, dim, NUM_IDS, runs)


def check(what: str, found: Any, expected: Any) -> None:
    """Ends the benchmark if a kernel's result is wrong."""
    if not np.array_equal(found, np.broadcast_to(expected, np.shape(found))):
        raise SystemExit(f"{what}: another result than NumPy's")


def measure(case: Case, rounds: int, calls: int) -> list[dict[str, float]]:
    """Returns the median seconds of a call of each, by round; the calls of a round are interleaved."""
    measured = []
    for _ in range(rounds):
        times: dict[str, list[float]] = {name: [] for name in case.runs}
        for _ in range(calls):
            for name, prepared in case.runs.items():
                run = prepared()
                begun = time.perf_counter()
                run()
                times[name].append(time.perf_counter() - begun)
        measured.append({name: float(np.median(seconds)) for name, seconds in times.items()})
    return measured


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Yields all cases, one after the other: the next one overwrites the memory of the one before."""
    rng = np.random.default_rng(0)
    yield from of_batch(options.dims, rng)
    yield from of_cache(min(NUM_CACHED, max(options.rows)), options.batch, rng)
    memory = ReservedMemory(huge_pages=True).array(np.float32)
    memory = memory[: int(options.gigabytes * 1e9) // FLOAT_BYTES]
    for num_rows in options.rows:
        index = Index(num_rows)
        yield from of_index(index, options.batch, rng)
        for dim in options.dims:
            yield from of_rows(index, memory, num_rows, dim, options.batch, rng)
        index.close()
        for dim in options.dims:
            for name in options.rules:
                yield of_rule(RULES[name], memory, num_rows, dim, options.batch, rng)


def gigabytes_here() -> float:
    """Returns the GB for rows and states: what the largest tables need, and at most half of this machine's memory."""
    return min(MOST_GIGABYTES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2e9)


def row_of(case: Case, measured: Sequence[dict[str, float]]) -> list[str]:
    """Returns the cells of a case."""
    ours = np.array([each[OURS] for each in measured])
    cells = [
        case.kernel,
        f"{case.num_rows / 1e6:.3g} M",
        str(case.dim or ""),
        f"{case.batch / np.median(ours) / 1e6:.1f}",
    ]
    for name in (LIMIT, MEMCPY, FIND, NUMPY):
        if name not in measured[0]:
            cells.append("")
            continue
        low, middle, high = np.percentile(np.array([each[name] for each in measured]) / ours, [25, 50, 75])
        cells.append(f"{middle:.2f} ({low:.2f} - {high:.2f})")
    return cells


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures all kernels and prints a table."""
    trained = [name for name, rule in RULES.items() if rule.kernel is not None]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=AT_LEAST_1, nargs="+", default=[1_000_000, 20_000_000])
    parser.add_argument("--dims", type=DIM, nargs="+", default=[8, 16, 64, 128])
    parser.add_argument("--rules", nargs="+", choices=trained, default=trained, metavar="RULE")
    parser.add_argument("--batch", type=AT_LEAST_1, default=13_000, help="ids or rows of a call")
    parser.add_argument("--calls", type=AT_LEAST_1, default=20, help="calls of each in a round")
    parser.add_argument("--rounds", type=AT_LEAST_1, default=5)
    parser.add_argument(
        "--gigabytes",
        type=amount,
        default=gigabytes_here(),
        help=f"largest memory for rows and states; left out, half of the machine's, {MOST_GIGABYTES:g} at most",
    )
    add_results(parser)
    options = parser.parse_args(arguments)
    check_batch(parser, options.batch, min(options.rows))
    record = Record("kernels", options)
    console = Console()
    warm_up()
    table = Table(title=f"batches of {options.batch:,}; times of the others over ours, medians (quartiles)")
    for heading in ("kernel", "rows", "dim", "M/s", "limit / ours", "memcpy / ours", "find / ours", "NumPy / ours"):
        table.add_column(heading, justify="right" if heading != "kernel" else "left", no_wrap=True)
    measured: dict[str, list[dict[str, float]]] = {}
    about: dict[str, dict[str, Any]] = {}
    with console.status("") as status:
        for case in cases(options):
            name = f"{case.kernel}, {case.num_rows} rows, dim {case.dim}"
            status.update(name)
            about[name] = {"kernel": case.kernel, "num_rows": case.num_rows, "dim": case.dim, "batch": case.batch}
            measured[name] = measure(case, options.rounds, options.calls)
            table.add_row(*row_of(case, measured[name]))
    console.print(table)
    rounds = [{name: measured[name][k] for name in measured} for k in range(options.rounds)]
    record.append(rounds, cases=about)


if __name__ == "__main__":
    main()
