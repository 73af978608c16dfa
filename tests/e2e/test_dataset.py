"""Data sets in real processes: two workers on two pservers."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from support.jobs import outputs_of

SIZES = (21, 14, 9, 17)


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


def losses(directory: Path, files: str, kind: str) -> list[list[str]]:
    directory.mkdir()
    outputs = outputs_of("dataset.py", directory, DATASET=kind, FILES=files)
    return [re.findall(r"^loss (\S+)", output, re.MULTILINE) for output in outputs]


@pytest.mark.parametrize("kind", ["InMemoryDataset", "QueueDataset"])
def test_losses_of_a_job_are_those_of_a_loop(tmp_path: Path, files: str, kind: str) -> None:
    plain, of_dataset = (losses(tmp_path / each, files, each) for each in ("loop", kind))
    assert of_dataset == plain
    assert [len(of_worker) for of_worker in plain] == [2 * 5, 2 * 4]
