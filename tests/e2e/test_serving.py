"""A job saves a model; it is exported, and predicts in processes that do not know fleet_sparse."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fleet_sparse.snapshot.directory import directory_at
from fleet_sparse.snapshot.store import SnapshotStore
from support.jobs import environment, outputs_of

PREDICTS = """
import sys
import numpy as np, paddle
paddle.enable_static()
exe = paddle.static.Executor(paddle.CPUPlace())
program, feeds, targets = paddle.static.load_inference_model("out/model", exe)
with np.load("expected.npz") as known:
    ids, expected = known["ids"], known["prediction"]
(found,) = exe.run(program, feed={"ids": ids}, fetch_list=targets)
config = paddle.inference.Config("out/model.json", "out/model.pdiparams")
predictor = paddle.inference.create_predictor(config)
predictor.get_input_handle("ids").copy_from_cpu(ids)
predictor.run()
other = predictor.get_output_handle(predictor.get_output_names()[0]).copy_to_cpu()
assert feeds == ["ids"] and "fleet_sparse" not in sys.modules
assert np.isfinite(expected).all() and len(np.unique(expected)) > 30
for value in (found, other):
    np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-6)
"""


def export(directory: Path, *arguments: str) -> str:
    command = [sys.executable, "-W", "ignore", "-m", "fleet_sparse.cli", "export", *arguments]
    ended = subprocess.run(command, cwd=directory, env=environment(), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize(("num_servers", "num_workers"), [(1, 1), (2, 2), (3, 1)])
def test_a_job_and_its_plain_model_predict_alike(tmp_path: Path, num_servers: int, num_workers: int) -> None:
    outputs_of("served.py", tmp_path, num_workers, num_servers=num_servers)
    store = SnapshotStore(directory_at(tmp_path / "serve" / "rows"))
    assert [store.manifest(name).num_shards for name in store.snapshots()] == [num_servers]
    assert "table 'items': 43 rows, float32" in export(tmp_path, "serve", "out")
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PREDICTS], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "wrote rows" in export(tmp_path, "serve", "rows", "--format", "dictionary", "--dtype", "int8")
    assert "table 'items' is intact: 43 rows, int8" in export(tmp_path, "--verify", "rows")
