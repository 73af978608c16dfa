"""Runs benchmarks one after the other, each in a process of its own, and writes docs/benchmarks.md and docs/scaling.md.

`scripts/bench` runs all of them and `scripts/bench growth kernels` these, in each of the ways that the page shows; then
the pages are written. `scripts/bench growth --rows 1M` runs one with other options (`scripts/bench growth --help` lists
them): its record goes to `output/benchmarks`, unless `--results` names another directory, and the pages stay.
`scripts/bench --page` only writes the pages.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from benchmarks import page, scaling_page
from benchmarks.goals import OLD_COMMIT
from benchmarks.record import RESULTS, ROOT

_REFUSED = 2
"""Exit code of argparse for options that it refused."""
_WITHOUT_LOCAL = ("--local-rows", "0")
_LONG = ("--examples", "1200000", "--evaluate-every", "400")
_TWO_PSERVERS = ("--pservers", "2")
_MANY_BOUNDS = ("--drifts", "0.5", "1", "4", "8", "16", "--lags", "10", "30", "300", "1000", "--seeds", "3")

WAYS: dict[str, tuple[tuple[str, ...], ...]] = {
    "start": (("--baseline",),),
    "membership": ((),),
    "keys": ((),),
    "kernels": ((),),
    "entries": ((),),
    "log": ((),),
    "client": ((),),
    "local": ((),),
    "lookup": (
        ("--baseline",),
        ("--baseline", "--serial", "--cached", *_WITHOUT_LOCAL),
        ("--baseline", "--channel", "zmq", *_WITHOUT_LOCAL),
    ),
    "step": (
        ("--mode", "async", "--baseline", "--dataset-steps", "300"),
        ("--mode", "async", "--channel", "zmq", *_WITHOUT_LOCAL),
        ("--mode", "async", "--max-step-lag", "4", *_WITHOUT_LOCAL),
        ("--mode", "async", "--serial", "--cached", *_WITHOUT_LOCAL),
        ("--mode", "async", "--mkl-avx2", "--baseline", "--dataset-steps", "300", *_WITHOUT_LOCAL),
        ("--mode", "sync", *_WITHOUT_LOCAL),
        ("--mode", "sync", "--serial", *_WITHOUT_LOCAL),
        ("--mode", "sync", "--mkl-avx2", *_WITHOUT_LOCAL),
        ("--mode", "sync", "--mkl-avx2", "--serial", *_WITHOUT_LOCAL),
        ("--mode", "sync", "--channel", "zmq", *_WITHOUT_LOCAL),
        ("--mode", "geo", *_WITHOUT_LOCAL),
    ),
    "dataset": (("--baseline",), ("--mkl-avx2", "--baseline"), ("--mkl-avx2", "--baseline", "--threads", "2")),
    "link": (("--baseline",), ("--mkl-avx2", "--baseline"), ("--model", "lookup", "--baseline")),
    "spread": ((), ("--mkl-avx2",)),
    "parts": (("--serial",), ("--serial", "--mkl-avx2"), ("--model", "lookup", "--mode", "async", "--serial")),
    "cluster": ((),),
    "durability": ((),),
    "growth": ((),),
    "het_misses": ((),),
    "het_traffic": ((),),
    "het_cost": ((),),
    "het_auc": (
        *(
            ("--model", model, "--optimizer", optimizer, "--workers", "8", "--seeds", "3")
            for model in ("wide_deep", "deepfm", "dcn")
            for optimizer in ("adagrad", "adam")
        ),
        *(
            ("--model", model, "--optimizer", optimizer, "--workers", "4", "--seeds", "3", "--bounds", "drift")
            for model in ("wide_deep", "deepfm", "dcn")
            for optimizer in ("adagrad", "adam")
        ),
        ("--workers", "8", "--examples", "600000", *_MANY_BOUNDS),
    ),
    "het_link": (
        (),
        ("--dim", "16"),
        ("--rate", "1000", "--dim", "64"),
        ("--rate", "1000", "--dim", "256"),
        ("--rate", "1000", "--dim", "1024", "--ids", "100000", "--examples", "100000"),
        *(
            ("--rate", rate, "--dim", dim, *others)
            for rate, dim in (("100", "128"), ("1000", "256"))
            for others in (_LONG, _TWO_PSERVERS, (*_TWO_PSERVERS, *_LONG))
        ),
        *(("--rate", "10000", "--dim", dim) for dim in ("128", "256")),
    ),
    "het_save": ((), ("--trace-steps", "0")),
    "snapshot": (("--baseline",),),
    "dense": ((),),
    "serving": ((),),
    "convergence": ((), ("--data", "synthetic", "400000")),
    "scale": ((),),
    "compare": (("--against", OLD_COMMIT), ("--against", OLD_COMMIT, "--durability", "none", "step")),
}
"""Options of the runs that the page shows, by benchmark. A run in another way does not count for a goal."""


def main(arguments: Sequence[str]) -> int:
    """Runs the named benchmarks and writes the pages; returns an exit code."""
    split = next((at for at, argument in enumerate(arguments) if argument.startswith("-")), len(arguments))
    names, options = list(arguments[:split]), tuple(arguments[split:])
    unknown = [name for name in names if name not in WAYS]
    if unknown or (options and not names and options != ("--page",)):
        if unknown:
            print(f"no benchmark is called {', '.join(unknown)}; there are {', '.join(WAYS)}", file=sys.stderr)
            return 2
        print(f"{__doc__}\nBenchmarks: {', '.join(WAYS)}")
        return 0 if options in {("--help",), ("-h",)} else 2
    failed = []
    for name in [] if options == ("--page",) else names or WAYS:
        for way in (options,) if options else [(*way, "--results", str(RESULTS)) for way in WAYS[name]]:
            print(f"== {' '.join((name, *way))}", flush=True)
            code = subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *way], cwd=ROOT, check=False).returncode
            if code == _REFUSED:
                return code
            if code:
                failed.append(name)
    if not options or options == ("--page",):
        page.write()
        scaling_page.write()
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
