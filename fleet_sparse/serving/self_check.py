"""The self-check of a model: another process opens its networks and has to predict as the job.

Run as `python -m fleet_sparse.serving.self_check DIRECTORY`, it prints what it found as JSON. The process has no ops of
fleet_sparse, so that it sees what any process with Paddle sees.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.errors import FleetSparseError

from .model import FORWARD, IDS, NETWORK, Finding

TOLERANCE = 1e-6
CONFIGURATIONS = {"default": None, "oneDNN off": False}
TIMEOUT_S = 600.0

_REQUEST = "request.json"
_EXPECTED = "expected.npz"


class Expected(NamedTuple):
    """Results that the job computed."""

    feed: Mapping[str, NDArray[Any]]
    targets: Sequence[NDArray[Any]]
    rows: Sequence[NDArray[np.float32]]
    """Rows of each lookup: the shape of its ids and one more dimension."""
    computed_ids: Sequence[NDArray[Any]]
    """Ids of each lookup that computes them."""
    tables: Sequence[str]
    """Name of the table of each lookup."""
    target_names: Sequence[str]


def check_networks(directory: Path, expected: Expected, package_path: str) -> list[Finding]:
    """Runs the self-check in another process; returns the largest difference of each network and configuration.

    Args:
        directory: Has the networks and receives files for the process.
        expected: What the job computed.
        package_path: A PYTHONPATH with this package.

    Raises:
        FleetSparseError: A prediction differs by more than `TOLERANCE`, computed ids differ, or the process failed.
    """
    arrays: dict[str, Any] = {f"feed.{name}": value for name, value in expected.feed.items()}
    for kind in ("targets", "rows", "computed_ids"):
        arrays.update({f"{kind}.{number}": value for number, value in enumerate(getattr(expected, kind))})
    np.savez(directory / _EXPECTED, **arrays)
    names = {"tables": list(expected.tables), "target_names": list(expected.target_names)}
    (directory / _REQUEST).write_text(json.dumps(names))
    environment = {**os.environ, "PYTHONPATH": package_path}
    command = [sys.executable, "-W", "ignore", "-m", "fleet_sparse.serving.self_check", str(directory)]
    try:
        ended = subprocess.run(command, capture_output=True, env=environment, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise FleetSparseError(
            f"save_inference_model: the process that checks the networks did not end within {TIMEOUT_S:g} s"
        ) from error
    if ended.returncode != 0:
        raise FleetSparseError(
            f"save_inference_model: the process that checks the networks ended with {ended.returncode}: "
            f"{ended.stderr.decode(errors='replace').strip()[-1000:]}"
        )
    answer = json.loads(ended.stdout.decode().strip().splitlines()[-1])
    for fault in answer["faults"]:
        raise FleetSparseError(
            f"save_inference_model: {fault['value']} of the saved {fault['network']} differs by "
            f"{fault['difference']:.3g} in paddle.inference, {fault['configuration']} configuration, should be at most "
            f"{TOLERANCE:g}. The model is not saved; please report the network"
        )
    return [Finding(**each) for each in answer["findings"]]


def difference_of(found: NDArray[Any], expected: NDArray[Any]) -> float:
    """The largest difference relative to the larger of 1 and the largest magnitude; infinite for other shapes."""
    if found.shape != expected.shape:
        return float("inf")
    if not found.size:
        return 0.0
    if expected.dtype.kind not in "fc":
        return 0.0 if np.array_equal(found, expected) else float("inf")
    same = (found == expected) | (np.isnan(found) & np.isnan(expected))
    if same.all():
        return 0.0
    finite = np.abs(expected[np.isfinite(expected)])
    scale = max(1.0, float(finite.max())) if finite.size else 1.0
    differences = np.where(same, 0.0, np.abs(found.astype(np.float64) - expected))
    return float("inf") if np.isnan(differences).any() else float(differences.max()) / scale


def _compare(directory: Path) -> dict[str, list[dict[str, Any]]]:
    """Results that a process computes with the networks of a directory."""
    from .paddle_network import predict

    request = json.loads((directory / _REQUEST).read_text())
    with np.load(directory / _EXPECTED) as file:
        arrays = {name: file[name] for name in file.files}
    of_kind = {kind: _list(arrays, kind) for kind in ("targets", "rows", "computed_ids")}
    feed = {name.removeprefix("feed."): value for name, value in arrays.items() if name.startswith("feed.")}
    targets = dict(zip((f"target {name!r}" for name in request["target_names"]), of_kind["targets"], strict=True))
    ids = {f"computed ids {number}": value for number, value in enumerate(of_kind["computed_ids"])}
    looked_up = _as_inputs(request["tables"], of_kind["rows"])
    wanted = {FORWARD: {**targets, **ids}, NETWORK: targets, IDS: ids}
    findings, faults = [], []
    for network, values in wanted.items():
        if not (directory / f"{network}.json").exists():
            continue
        for configuration, has_onednn in CONFIGURATIONS.items():
            results = predict(directory / network, {**feed, **looked_up}, has_onednn=has_onednn)
            differences = {name: difference_of(a, b) for (name, b), a in zip(values.items(), results, strict=True)}
            worst = max(differences, key=lambda name: differences[name])
            found = {"network": network, "configuration": configuration, "difference": differences[worst]}
            findings.append(found)
            if not differences[worst] <= TOLERANCE:
                faults.append({**found, "value": worst})
    return {"findings": findings, "faults": faults}


def _list(arrays: Mapping[str, NDArray[Any]], kind: str) -> list[NDArray[Any]]:
    count = sum(name.startswith(f"{kind}.") for name in arrays)
    return [arrays[f"{kind}.{number}"] for number in range(count)]


def _as_inputs(tables: Sequence[str], rows: Sequence[NDArray[np.float32]]) -> dict[str, NDArray[Any]]:
    """Inputs of the forward program and of the split network, in which each looked up row has a position of its own."""
    inputs: dict[str, NDArray[Any]] = {f"{t}@lookup.{n}": r for n, (t, r) in enumerate(zip(tables, rows, strict=True))}
    for table in set(tables):
        own = [(number, each) for number, each in enumerate(rows) if tables[number] == table]
        inputs[f"{table}@rows"] = np.concatenate([each.reshape(-1, each.shape[-1]) for _, each in own])
        begin = 0
        for number, each in own:
            size = each[..., 0].size
            inputs[f"{table}@index.{number}"] = np.arange(begin, begin + size).reshape(each.shape[:-1])
            begin += size
    return inputs


if __name__ == "__main__":
    print(json.dumps(_compare(Path(sys.argv[1]))))
