"""`fleet-sparse parity --serving`: compares a served model with its job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.table import Table

from fleet_sparse.local_pservers import Child, local_pservers, run_together

from .terminal import AS_IS, console

_LIMIT_S = 300.0
_STEP_LIMIT_S = 0.2


def compare_serving(servers: int, readers: int, steps: int) -> bool:
    """Trains and saves on `servers` pservers, prints a table of differences, and returns whether all are small.

    A way whose packages are not installed is not compared, and named as skipped.

    Args:
        servers: Number of pservers of the job; 0 for one inside the worker.
        readers: Number of read-only pservers.
        steps: Number of steps before each of two saves.
    """
    with console.status("training, saving, exporting and predicting"):
        result = _run(servers, readers, steps)
    tolerance, compared = result["tolerance"], result["compared"]
    console.print(_table(f"{steps} steps before each save, {_named(servers)}", compared, tolerance))
    if skipped := dict.fromkeys(each["way"] for each in compared if each["difference"] is None):
        console.print(f"skipped: {', '.join(skipped)}: needs fleet-sparse[onnx], which is not installed", **AS_IS)
    return all(each["difference"] is None or each["difference"] <= tolerance for each in compared)


def _run(servers: int, readers: int, steps: int) -> dict[str, Any]:
    with ExitStack() as stack:
        root = Path(stack.enter_context(TemporaryDirectory(prefix="fleet_sparse-")))
        environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "FLEET_SPARSE_ROOT": str(root)}
        if servers:
            pservers = stack.enter_context(local_pservers(servers, root=root, log=subprocess.DEVNULL))
            environment |= pservers.environment()
        command = [sys.executable, "-m", "fleet_sparse.tools.parity.serving", "--root", str(root)]
        command += ["--steps", str(steps), "--readers", str(readers)]
        (output,) = run_together([Child("worker 0", command, environment)], limit_s=_LIMIT_S + _STEP_LIMIT_S * steps)
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def _named(servers: int) -> str:
    return f"{servers or 'embedded'} pserver{'s' if servers > 1 else ''}"


def _table(title: str, compared: list[dict[str, Any]], tolerance: float) -> Table:
    table = Table(title=title)
    for heading in ("way", "version", "max difference to the job", "parity"):
        table.add_column(heading, justify="left" if heading == "way" else "right", no_wrap=heading == "parity")
    for number, each in enumerate(compared):
        difference = each["difference"]
        shown, verdict = "-", "skipped"
        if difference is not None:
            shown, verdict = f"{difference:.1e}", "yes" if difference <= tolerance else f"NO: above {tolerance:.0e}"
        is_last = number + 1 == len(compared) or compared[number + 1]["version"] != each["version"]
        table.add_row(each["way"], f"{each['version']} ({each['kind']})", shown, verdict, end_section=is_last)
    return table
