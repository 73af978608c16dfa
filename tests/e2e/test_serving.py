"""A job saves a model; it is exported, and predicts in processes that do not know fleet_sparse."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fleet_sparse.local_pservers import local_pservers
from fleet_sparse.serving.predictor import Predictor
from fleet_sparse.serving.version_predictor import version_predictor
from fleet_sparse.snapshot.directory import directory_at
from fleet_sparse.snapshot.store import SnapshotStore
from support.jobs import environment, outputs_of
from support.sources import ROOT

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


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_servers", [1, 2, 3])
def test_any_number_of_pservers_reads_what_others_saved(tmp_path: Path, num_servers: int) -> None:
    """The predictions are those of the job, and bit for bit those of a process that holds the version."""
    outputs_of("served.py", tmp_path, 1, num_servers=num_servers)
    serve = str(tmp_path / "serve")
    with np.load(tmp_path / "expected.npz") as known:
        ids, expected = known["ids"], known["prediction"]
    assert {-1, -(2**63), 2**63 - 1} <= set(ids.flat)
    feeds = [{"ids": np.resize(ids, (size, 4))} for size in (0, 1, 2, 513)]
    with version_predictor(serve, directory_at(tmp_path / "serve" / "rows" / "000001-full")) as predictor:
        computed_again = [predictor.run(feed).outputs for feed in feeds]
    for num_readers in (1, 2, 5):
        with (
            local_pservers(
                num_readers, root=tmp_path, load_dirname="serve/rows", arguments=["--read-only"]
            ) as pservers,
            Predictor(serve, pservers.endpoints) as predictor,
        ):
            (found,) = predictor.run({"ids": ids}).outputs.values()
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
            for feed, wanted in zip(feeds, computed_again, strict=True):
                for name, value in predictor.run(feed).outputs.items():
                    assert value.tobytes() == wanted[name].tobytes()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_demo_of_serving_ends_well(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", str(ROOT / "examples" / "serving" / "demo.py")]
    ended = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "All predictions agree" in ended.stdout
