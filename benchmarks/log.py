"""What does a log cost a push, and how soon does a shard continue from one?

`python -m benchmarks.log` from the root of a checkout. A shard in this process, without sockets. In each round:

- pushes of a click model's step to one of two pservers, about 4000 rows of dim 16 and 1 MB of dense gradients, with
  Adagrad: without a log, with `log` and with `sync`, in turns;
- a restart: a shard with a checkpoint of many rows and a log of pushes to them is filled again. The time is that from
  an empty shard until it continues; the start of the process is not in it. The run fails if a row differs.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.options import AT_LEAST_1, AT_LEAST_2
from benchmarks.record import Record, add_results
from fleet_sparse.core.dense_spec import DenseSpec, Segment
from fleet_sparse.core.initializer import uniform
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.pserver.admin.log_recovery import close_log, start_log, write_checkpoint
from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.settings import Settings
from fleet_sparse.warm_up import warm_up
from fleet_sparse.wire.frame_format import Action, Block, Header, Op

DIM, DENSE_VALUES = 16, 243_000
SPEC = TableSpec(name="embedding", dim=DIM, rule="adagrad", initializer=uniform(-0.01, 0.01))
DENSE = DenseSpec("dense", "adagrad", (), (Segment("fc.w_0", 0, DENSE_VALUES, 1.0),))
NONE, LOG, SYNC, RESTART = "no log", "log", "sync", "restart"
Ids = NDArray[np.int64]
Floats = NDArray[np.float32]
NUM_SAMPLES = 1000
"""Rows that are compared after a restart."""


class Trainer:
    """A client that pushes to a shard.

    Args:
        durability: As `Settings.durability`.
        directory: Directory of the log.
    """

    def __init__(self, durability: str, directory: Path) -> None:
        settings = Settings(durability=durability, job_id="benchmark")  # type: ignore[arg-type]
        self.shard = Shard(0, 1, cluster_id=1, incarnation=1, placement=Placement.even(1))
        if durability != "none":
            start_log(self.shard, directory, settings)
        for spec in (SPEC, DENSE):
            self.shard.add_table(spec, declared_by="benchmark")
        self._seq = self.shard.ledger.applied(bytes(16))

    def ask(self, op: Op, *blocks: Block) -> list[Block]:
        """Sends a push; or a pull, whose rows are returned."""
        self._seq += op is not Op.PULL
        header = Header(op, push_seq=self._seq if op is not Op.PULL else 0)
        return self.shard.execute(header, blocks).blocks

    def push(self, ids: Ids, grads: Floats, dense: Floats | None = None) -> None:
        """Pushes gradients of rows, and of the dense array."""
        step = self._seq + 1
        rows = Block(Action.PUSH, SPEC.table_id, SPEC.schema_hash, DIM, len(ids), ids, grads, 0.05, step)
        blocks = [rows]
        if dense is not None:
            blocks.append(Block(Action.PUSH, DENSE.table_id, DENSE.schema_hash, 1, len(dense), None, dense, 0.05, step))
        self.ask(Op.PUSH, *blocks)

    def rows(self, ids: Ids) -> bytes:
        """Returns the bits of rows."""
        block = self.ask(Op.PULL, Block(Action.PULL, SPEC.table_id, SPEC.schema_hash, DIM, len(ids), ids))[0]
        assert block.rows is not None
        return block.rows.tobytes()

    def close(self) -> None:
        """Frees memory and log."""
        if self.shard.log is not None:
            close_log(self.shard.log)
        self.shard.close()


def pushes(options: argparse.Namespace, rng: np.random.Generator, root: Path) -> dict[str, dict[str, float]]:
    """Measures pushes with and without a log, in turns."""
    trainers = {
        case: Trainer(durability, root / durability)
        for case, durability in ((NONE, "none"), (LOG, "log"), (SYNC, "sync"))
    }
    values = np.zeros((DENSE_VALUES, 1), np.float32)
    for each in trainers.values():
        each.ask(Op.ASSIGN, Block(Action.ASSIGN, DENSE.table_id, DENSE.schema_hash, 1, DENSE_VALUES, None, values))
    ms: dict[str, list[float]] = {case: [] for case in trainers}
    for _ in range(options.pushes):
        ids = np.unique(rng.zipf(1.1, 2 * options.batch).astype(np.int64))[: options.batch]
        grads = rng.standard_normal((len(ids), DIM), np.float32)
        dense = rng.standard_normal((DENSE_VALUES, 1), np.float32)
        for case, trainer in trainers.items():
            begun_at = time.perf_counter()
            trainer.push(ids, grads, dense)
            ms[case].append(1e3 * (time.perf_counter() - begun_at))
    for each in trainers.values():
        each.close()
    return {
        case: {"median_ms": float(np.median(each)), "p99_ms": float(np.percentile(each, 99))}
        for case, each in ms.items()
    }


def restart(options: argparse.Namespace, rng: np.random.Generator, root: Path) -> dict[str, float]:
    """Measures how long a shard takes to continue from a checkpoint and a log.

    Raises:
        RuntimeError: A row differs.
    """
    before = Trainer("log", root / "restart")
    ids = np.arange(options.rows, dtype=np.int64)
    for some in np.array_split(ids, max(options.rows // 100_000, 1)):
        before.push(some, np.ones((len(some), DIM), np.float32))
    write_checkpoint(before.shard)
    log = before.shard.log
    assert log is not None, "it has one"
    begun_at = log.writer.size.num_bytes
    while log.writer.size.num_bytes - begun_at < options.megabytes << 20:
        some = rng.choice(options.rows, min(options.batch, options.rows), replace=False)
        before.push(some, rng.standard_normal((len(some), DIM), np.float32))
    sample = rng.choice(options.rows, min(NUM_SAMPLES, options.rows), replace=False)
    expected, num_bytes = before.rows(sample), log.writer.size.num_bytes - begun_at
    before.close()
    begun_s = time.perf_counter()
    after = Trainer("log", root / "restart")
    seconds = time.perf_counter() - begun_s
    is_equal = after.rows(sample) == expected
    after.close()
    if not is_equal:
        raise RuntimeError("a row is not what it was before the restart")
    return {"seconds": seconds, "num_bytes": num_bytes}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the rounds, prints a table and records them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pushes", type=AT_LEAST_1, default=400, help="pushes of each case in a round")
    parser.add_argument("--batch", type=AT_LEAST_1, default=4000, help="rows of a push")
    parser.add_argument("--rows", type=AT_LEAST_1, default=10_000_000, help="rows of the checkpoint of a restart")
    parser.add_argument("--megabytes", type=AT_LEAST_1, default=1024, help="size of its log")
    parser.add_argument("--rounds", type=AT_LEAST_2, default=3)
    parser.add_argument("--root", type=Path, help="where the logs lie; default: the system's directory for files")
    add_results(parser)
    options = parser.parse_args(arguments)
    warm_up(trains=False)
    record = Record("log", options)
    rounds = []
    for number in range(options.rounds):
        rng = np.random.default_rng(number)
        with tempfile.TemporaryDirectory(dir=options.root) as root:
            rounds.append({**pushes(options, rng, Path(root)), RESTART: restart(options, rng, Path(root))})
    record.append(rounds)
    grid = Table("case", "ms a push", "p99, ms", "s to continue")
    for case in rounds[0]:
        found = [[each[case].get(key) for each in rounds] for key in ("median_ms", "p99_ms", "seconds")]
        grid.add_row(case, *("" if None in values else f"{np.median(values):.2f}" for values in found))  # type: ignore[arg-type]
    Console().print(grid)


if __name__ == "__main__":
    main()
