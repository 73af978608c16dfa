"""Jobs that no machine here could run: docs/scaling.md tells what the model of `fleet-sparse plan` says of them."""

from __future__ import annotations

from dataclasses import replace

from fleet_sparse.plan import SYNC, Job, Machines

HET = Job(rows=33_762_577, rule="sgd", batch=128, workers=32, compute_s=0.01)
HET_PSERVERS = 4
HET_LARGEST = replace(HET, dim=4096, rows=1e12 / 4096)
THOUSANDS = Job(rows=1e11, dense=500_000, workers=4000, compute_s=0.05)
LARGEST = Job(rows=1e11, workers=4000, compute_s=0.02)
LARGEST_PSERVERS = 1000
OF_SYNC = "4000 workers, sync"
EXAMPLES = (
    ("HET, 1e12 values, 10 Gbit/s", HET_LARGEST, Machines(512e9, 10e9), None),
    ("4000 workers, async", THOUSANDS, Machines(512e9), 100),
    ("4000 workers, async", THOUSANDS, Machines(512e9), 1000),
    (OF_SYNC, replace(THOUSANDS, mode=SYNC), Machines(512e9), 100),
    (OF_SYNC, replace(THOUSANDS, mode=SYNC), Machines(512e9), 1000),
)
"""Those of which it is told how sure the model is, with numbers of pservers, or None where the plan chooses."""
