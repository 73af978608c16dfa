"""How long does a step take that only looks rows up, sums them and pushes their gradients?

`python -m benchmarks.lookup` from the root of a checkout. 26 fields on one table, dim 16 with Adagrad, batch 512:
13 312 ids a step, Zipf 1.1 over 10 M a field. The loss is that of the sum of an example's rows, so nothing hides what
pservers cost. The program runs plainly and behind `look_ahead`; the floor is the same program with its rows fed from
memory; plain Paddle trains a local table, as in `benchmarks.step`. Blocks of steps are interleaved. `--cached` also
measures the program with a row cache, in a job of its own (`benchmarks.cached_step`); `--baseline` also
measures PaddlePaddle 2.6's own parameter server on such a model, in a venv that it makes.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import numpy as np
import paddle

from benchmarks.options import AT_LEAST_1
from benchmarks.record import Record
from benchmarks.step import BATCH, DIM, NUM_FIELDS, Feed, Loss, add_options, as_recorded, batches, run, show


def main() -> None:
    """Measures the model and prints medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("async", "sync"), default="async", help="mode of training")
    parser.add_argument("--steps", type=AT_LEAST_1, default=20, help="steps of a block")
    add_options(parser)
    options = parser.parse_args()
    record = Record("lookup", options)
    name, feeds, loss_of = model(options.batches)
    measured = run(name, feeds, loss_of, options)
    show("lookup", options, measured)
    num_distinct = float(np.mean([len(np.unique(feed["ids"])) for feed in feeds]))
    about = {"batch": BATCH, "num_ids": feeds[0]["ids"].size, "num_distinct": num_distinct}
    record.append([as_recorded(each) for each in measured], **about)


def model(num_batches: int) -> tuple[str, list[Feed], Loss]:
    """Returns the lookup model: its name for the baseline, its batches and its loss."""
    feeds = [{"ids": feed["ids"], "label": feed["label"]} for feed in batches(num_batches)]
    return "lookup", feeds, sum_loss


def sum_loss(rows: Any) -> Any:
    """Returns the loss of the sum of an example's rows."""
    label = paddle.static.data("label", [-1, 1], "float32")
    width = NUM_FIELDS * DIM  # not `paddle.sum`, which does not run in the legacy IR
    logit = paddle.scale(paddle.mean(paddle.reshape(rows, [-1, width]), axis=1, keepdim=True), width)
    return paddle.nn.functional.binary_cross_entropy_with_logits(logit, label)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
