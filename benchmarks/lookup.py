"""How long does a step take that only looks rows up, sums them and pushes their gradients?

`python -m benchmarks.lookup` from the root of a checkout. 26 fields on one table, dim 16 with Adagrad, batch 512:
13 312 ids a step, Zipf 1.1 over 10 M a field. The loss is that of the sum of an example's rows, so nothing hides what
pservers cost. The program runs plainly and behind `look_ahead`; the floor is the same program with its rows fed from
memory. All run in turn, a block of steps each. `--peer` also measures PaddlePaddle 2.6's own parameter server on such a
model, in a venv that it makes, by turns with ours.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle.distributed import fleet

from benchmarks.peers import paddle_steps
from benchmarks.record import Record, add_results
from benchmarks.step import DIM, NUM_FIELDS, PADDLE, batches, measure, show, start
from fleet_sparse.local_pservers import local_pservers


def main() -> None:
    """Prints medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pservers", type=int, default=2, help="processes; 0 is one inside this process")
    parser.add_argument("--mode", choices=("async", "sync"), default="async", help="of training")
    parser.add_argument("--steps", type=int, default=50, help="of a block")
    parser.add_argument("--rounds", type=int, default=8, help="blocks of steps of each program; the first is not timed")
    parser.add_argument("--peer", action="store_true", help="measure PaddlePaddle 2.6's parameter server too")
    parser.add_argument("--peer-python", type=Path, help="interpreter that has it; a venv is made when left out")
    add_results(parser)
    options = parser.parse_args()
    record = Record("lookup", options)
    with ExitStack() as stack:
        if options.pservers:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            pservers = stack.enter_context(local_pservers(options.pservers, root=root, log=subprocess.DEVNULL))
            os.environ.update(pservers.environment())
        feeds = [{"ids": feed["ids"], "label": feed["label"]} for feed in batches(options.steps * options.rounds)]
        contenders = start(options.mode, feeds, sum_loss)
        peers = {}
        if options.peer:
            peers[PADDLE] = stack.enter_context(paddle_steps("lookup", servers=2, python=options.peer_python))
        measured = measure(contenders, options.steps, options.rounds, peers)
        fleet.stop_worker()
    show("lookup", options.pservers, options.mode, measured)
    num_distinct = float(np.mean([len(np.unique(feed["ids"])) for feed in feeds]))
    record.append(measured, num_ids=feeds[0]["ids"].size, num_distinct=num_distinct)


def sum_loss(rows: Any) -> Any:
    """Of the sum of an example's rows."""
    label = paddle.static.data("label", [-1, 1], "float32")
    logit = paddle.sum(paddle.reshape(rows, [-1, NUM_FIELDS * DIM]), axis=1, keepdim=True)
    return paddle.nn.functional.binary_cross_entropy_with_logits(logit, label)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
