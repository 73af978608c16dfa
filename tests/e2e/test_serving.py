"""A job saves a model; it is exported, and predicts in processes that do not know fleet_sparse."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

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


class ServedJob(NamedTuple):
    """A job that saved a model in `serve` and ended."""

    directory: Path
    num_servers: int

    def expected(self) -> dict[str, NDArray[Any]]:
        """Returns what worker 0 read."""
        with np.load(self.directory / "expected.npz") as file:
            return dict(file)


@pytest.fixture(scope="module")
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ServedJob:
    num_servers, num_workers = request.param
    directory = tmp_path_factory.mktemp("served")
    outputs_of("served.py", directory, num_workers, num_servers=num_servers)
    return ServedJob(directory, num_servers)


@pytest.mark.parametrize(
    "job",
    [pytest.param((1, 1), marks=pytest.mark.slow), (2, 2), pytest.param((3, 1), marks=pytest.mark.slow)],
    indirect=True,
)
def test_a_job_and_its_plain_model_predict_alike(job: ServedJob) -> None:
    directory = job.directory
    store = SnapshotStore(directory_at(directory / "serve" / "rows"))
    assert [store.manifest(name).num_shards for name in store.snapshots()] == [job.num_servers]
    assert "table 'items': 43 rows, float32" in export(directory, "serve", "out")
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PREDICTS], cwd=directory, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "wrote rows" in export(directory, "serve", "rows", "--format", "dictionary", "--dtype", "int8")
    assert "table 'items' is intact: 43 rows, int8" in export(directory, "--verify", "rows")


@pytest.mark.parametrize("job", [(2, 2), (3, 1)], indirect=True)
def test_a_running_job_loads_rows_and_dense_values(job: ServedJob) -> None:
    read = job.expected()
    for name in ("prediction", "rows", "w"):
        assert (read[name] != read[f"{name}_later"]).any()
        assert read[name].tobytes() == read[f"{name}_loaded"].tobytes()


@pytest.mark.parametrize("job", [(3, 1)], indirect=True)
def test_the_example_of_dictionaries_predicts_as_the_job(job: ServedJob) -> None:
    directory, read = job.directory, job.expected()
    export(directory, "serve", "dictionary", "--format", "dictionary")
    page = (ROOT / "docs" / "dictionary.md").read_text(encoding="utf-8")
    (reader,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    (directory / "dictionary_reader.py").write_text(reader)
    np.savez(directory / "feeds.npz", ids=read["ids"])
    script = str(ROOT / "examples" / "serving" / "from_dictionary.py")
    subprocess.run(
        [sys.executable, "-W", "ignore", script, "serve", "dictionary", "feeds.npz", "out.npy"],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(directory)},
        check=True,
    )
    np.testing.assert_allclose(np.load(directory / "out.npy"), read["prediction"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "num_readers", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 5]
)
@pytest.mark.parametrize(
    "job",
    [pytest.param((1, 1), marks=pytest.mark.slow), pytest.param((2, 1), marks=pytest.mark.slow), (3, 1)],
    indirect=True,
)
def test_any_number_of_pservers_reads_what_others_saved(job: ServedJob, num_readers: int) -> None:
    """The predictions are those of the job, and bit for bit those of a process that holds the version."""
    serve, read = str(job.directory / "serve"), job.expected()
    ids = read["ids"]
    assert {-1, -(2**63), 2**63 - 1} <= set(ids.flat)
    feeds = [{"ids": np.resize(ids, (size, 4))} for size in (0, 1, 2, 513)]
    with version_predictor(serve, directory_at(job.directory / "serve" / "rows" / "000001-full")) as predictor:
        computed_again = [predictor.run(feed).outputs for feed in feeds]
    with (
        local_pservers(
            num_readers, root=job.directory, load_dirname="serve/rows", arguments=["--read-only"]
        ) as pservers,
        Predictor(serve, pservers.endpoints) as predictor,
    ):
        (found,) = predictor.run({"ids": ids}).outputs.values()
        np.testing.assert_allclose(found, read["prediction"], rtol=1e-6, atol=1e-6)
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
