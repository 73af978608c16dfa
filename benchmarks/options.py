"""Types of the options that several benchmarks have. A value that is refused ends the run with exit code 2."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from fleet_sparse.core.ids import NUM_BUCKETS
from fleet_sparse.core.rules import RULES
from fleet_sparse.counts import count_from
from fleet_sparse.wire.frame_format import MAX_DIM

AT_LEAST_0, AT_LEAST_1, AT_LEAST_2 = map(count_from, range(3))
"""Counts."""
DIM = count_from(1, MAX_DIM)
PSERVERS, PSERVERS_OR_EMBEDDED = count_from(1, NUM_BUCKETS), count_from(0, NUM_BUCKETS)
TRAINED = tuple(name for name, rule in RULES.items() if rule.kernel is not None and rule.trains)
"""Names of the update rules that train."""


def amount(text: str) -> float:
    """Parses a finite number above 0, as a `type` of argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} should be a number above 0, and finite")
    return value


def check_batch(parser: argparse.ArgumentParser, batch: int, num_rows: int) -> None:
    """Ends the process if there are fewer rows than distinct ids in a batch."""
    if batch > num_rows:
        parser.error(f"argument --batch: {batch} should be at most --rows, which is {num_rows}")


def add_baseline(parser: argparse.ArgumentParser) -> None:
    """Adds the options that also measure PaddlePaddle 2.6's parameter server."""
    # All records have these options as `peer`; another name would make new runs another configuration.
    parser.add_argument("--baseline", dest="peer", action="store_true", help="also measure PaddlePaddle 2.6's server")
    parser.add_argument(
        "--baseline-python", dest="peer_python", type=Path, help="interpreter that has it; by default a venv is made"
    )
