"""A worker of `benchmarks.step` and `benchmarks.lookup` whose rows are cached, with pservers of its own.

A job has one bound on the lag of rows, so the program with a cache is another job than the one without. The only worker
of a job is exact at any bound. All rows fit into its cache. It prints a line once it is ready, then it reads numbers of
steps and answers each with the seconds of these steps and their CPU seconds, as JSON after `@@`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from paddle.distributed import fleet

from benchmarks import lookup, step
from fleet_sparse.local_pservers import local_pservers

MODELS = {"ctr": step.model, "lookup": lookup.model}
MARK = "@@"
DRIFT = 2 * step.LEARNING_RATE


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains as many steps as it is asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--mode", required=True)
    parser.add_argument("--pservers", type=int, required=True)
    parser.add_argument("--batches", type=int, required=True)
    step.add_execution_options(parser)
    options = parser.parse_args(arguments)
    step.apply_program_options(options)
    with ExitStack() as stack:
        pids: list[int] = []
        if options.pservers:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            pservers = stack.enter_context(local_pservers(options.pservers, root=root, log=subprocess.DEVNULL))
            os.environ.update(pservers.environment())
            pids = [each.process.pid for each in pservers.processes]
        _, feeds, loss_of = MODELS[options.model](options.batches)
        program = step.start(options.mode, feeds, loss_of, 0, max_row_drift=DRIFT)[0]
        answer("ready")
        for number, line in enumerate(sys.stdin):
            answer(step.block(program, step.turn(feeds, number, int(line)), pids)._asdict())
        fleet.stop_worker()


def answer(what: object) -> None:
    """Prints an answer."""
    print(MARK + json.dumps(what), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
