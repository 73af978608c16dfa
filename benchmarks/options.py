"""What options of the benchmarks may be, in one way for all of them: what is refused ends a run with exit code 2."""

from __future__ import annotations

import argparse
import math

from fleet_sparse.core.ids import NUM_BUCKETS
from fleet_sparse.core.rules import RULES
from fleet_sparse.counts import count_from
from fleet_sparse.wire.frame_format import MAX_DIM

AT_LEAST_0, AT_LEAST_1, AT_LEAST_2 = map(count_from, range(3))
"""Counts."""
DIM = count_from(1, MAX_DIM)
PSERVERS, PSERVERS_OR_EMBEDDED = count_from(1, NUM_BUCKETS), count_from(0, NUM_BUCKETS)
TRAINED = tuple(name for name, rule in RULES.items() if rule.kernel is not None and rule.trains)
"""Update rules."""


def amount(text: str) -> float:
    """A `type` for argparse: a number above 0, and finite."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} should be a number above 0, and finite")
    return value


def check_batch(parser: argparse.ArgumentParser, batch: int, num_rows: int) -> None:
    """Ends the process unless so many distinct ids can be drawn from the rows."""
    if batch > num_rows:
        parser.error(f"argument --batch: {batch} should be at most --rows, which is {num_rows}")
