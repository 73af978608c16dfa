"""Data sets in real processes: two workers on two pservers."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from support.jobs import job, outputs_of, wait_for_line

SIZES = (21, 14, 9, 17)
RESUMED = "dataset_resume.py"


@pytest.fixture
def files(tmp_path: Path) -> str:
    """Files with lines of three ids, one to four tags, and a label; separated by commas."""
    rng, paths = np.random.default_rng(0), []
    for number, size in enumerate(SIZES):
        path = tmp_path / f"part-{number}"
        with path.open("w") as file:
            for _ in range(size):
                tags = rng.integers(1, 20, rng.integers(1, 5)).tolist()
                ids = rng.integers(0, 60, 3).tolist()
                words = [3, *ids, len(tags), *tags, 1, rng.integers(0, 2)]
                file.write(" ".join(map(str, words)) + "\n")
        paths.append(str(path))
    return ",".join(paths)


def found(pattern: str, outputs: list[str]) -> list[list[str]]:
    return [re.findall(f"^{pattern}", output, re.MULTILINE) for output in outputs]


def losses(directory: Path, files: str, kind: str) -> list[list[str]]:
    directory.mkdir()
    return found(r"loss (\S+)", outputs_of("dataset.py", directory, DATASET=kind, FILES=files))


@pytest.mark.parametrize("kind", ["InMemoryDataset", pytest.param("QueueDataset", marks=pytest.mark.slow)])
def test_losses_of_a_job_are_those_of_a_loop(tmp_path: Path, files: str, kind: str) -> None:
    plain, of_dataset = (losses(tmp_path / each, files, each) for each in ("loop", kind))
    assert of_dataset == plain
    assert [len(of_worker) for of_worker in plain] == [2 * 5, 2 * 4]


def shuffled(directory: Path, files: str, **variables: str) -> list[str]:
    directory.mkdir()
    return outputs_of("dataset.py", directory, DATASET="InMemoryDataset", FILES=files, SHUFFLE="1", **variables)


def test_global_shuffle_moves_every_line_to_one_worker(tmp_path: Path, files: str) -> None:
    outputs = shuffled(tmp_path / "shuffled", files)
    before, after, of_all = zip(*(map(int, sizes[0].split()) for sizes in found("sizes (.*)", outputs)), strict=True)
    assert (before, sum(after), set(of_all)) == ((35, 26), sum(SIZES), {sum(SIZES)})
    # Each line is read in both epochs, by one worker.
    lines = found("line (.*)", outputs)
    assert [of_worker[: len(of_worker) // 2] for of_worker in lines] == [of[len(of) // 2 :] for of in lines]
    texts = [Path(path).read_text().split("\n")[:-1] for path in files.split(",")]
    written = sorted(" ".join([line.split()[-1], *line.split()[1:4]]) for text in texts for line in text)
    assert sorted(line for of_worker in lines for line in of_worker) == sorted(written * 2)


@pytest.mark.slow
def test_global_shuffle_depends_on_the_seed(tmp_path: Path, files: str) -> None:
    orders = [
        found("line (.*)", shuffled(tmp_path / name, files, FLEET_SPARSE_SEED=seed))
        for name, seed in (("first", "0"), ("again", "0"), ("other", "1"))
    ]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]


def written(path: Path, num_lines: int, seed: int) -> str:
    """Writes a file with lines of three ids and a label; returns its path."""
    rng = np.random.default_rng(seed)
    lines = (f"3 {' '.join(map(str, rng.integers(0, 60, 3)))} 1 {rng.integers(0, 2)}\n" for _ in range(num_lines))
    path.write_text("".join(lines))
    return str(path)


@pytest.mark.parametrize("kind", ["InMemoryDataset", pytest.param("QueueDataset", marks=pytest.mark.slow)])
def test_a_killed_job_resumes_within_its_data_set(tmp_path: Path, kind: str) -> None:
    sizes = (33, 30, 31, 38)
    variables = {
        "DATASET": kind,
        "FILES": ",".join(written(tmp_path / f"part-{number}", size, number) for number, size in enumerate(sizes)),
    }
    whole = found(r"loss (\S+)", outputs_of(RESUMED, tmp_path, **variables))
    assert sum(map(len, whole)) >= 3 * sum(sizes) / 4
    done = [len(of_worker) // 3 + 5 for of_worker in whole]  # in the second epoch
    with job(RESUMED, tmp_path, SAVE_AT=str(done[0]), **variables) as (_, workers):
        wait_for_line(workers[0], "saved")
    outputs = outputs_of(RESUMED, tmp_path, load="model", **variables)
    assert [re.findall(r"epoch (\d+)", output)[0] for output in outputs] == ["1", "1"]
    assert found(r"loss (\S+)", outputs) == [of_worker[num:] for of_worker, num in zip(whole, done, strict=True)]
