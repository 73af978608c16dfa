"""`fleet-sparse warm-up`: what it compiles and finds, and where it may not write; the cache is in tests/core."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from support.jobs import environment
from support.sources import PARTS, files_of

RULES = """
from fleet_sparse.core.jit import kernel
from fleet_sparse.core.rules import KERNEL_TYPES, UpdateRule
@kernel(*KERNEL_TYPES)
def apply(rows, row_stride, states, state_stride, state_offset, row_indices, grads, dim, scalars):
    rows[0] = scalars[0]
RULES = [UpdateRule("mine", 0, (), lambda _: (), lambda _, lr, step: None, apply)]
"""


def run(*arguments, **variables):
    return subprocess.run(
        [sys.executable, "-m", "fleet_sparse.cli", "warm-up", *arguments],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def found(**variables):
    ended = run("--json", **variables)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.fixture(scope="module")
def warm():
    """Output of a first run, which may have to compile kernels."""
    return found()


def test_all_kernels_of_the_package_are_compiled_or_found(warm) -> None:
    sources = [path.read_text(encoding="utf-8") for part in PARTS for path in files_of(part)]
    num_kernels = sum(line.startswith("@kernel(") for source in sources for line in source.splitlines())
    assert warm["num_kernels"] == warm["num_compiled"] + warm["num_found"] == num_kernels


def test_a_second_process_compiles_nothing(warm) -> None:
    again = found()
    assert (again["num_compiled"], again["num_found"]) == (0, warm["num_kernels"])
    assert again["directories"] == warm["directories"]


def test_custom_rules_are_compiled_too(warm, tmp_path) -> None:
    (tmp_path / "warm_rules.py").write_text(RULES)
    path = f"{tmp_path}:{environment()['PYTHONPATH']}"
    ended = found(FLEET_SPARSE_RULES="warm_rules", PYTHONPATH=path)
    assert ended["num_kernels"] == warm["num_kernels"] + 1
    assert str(tmp_path / "__pycache__") in ended["directories"]


def test_output_without_json_is_sentences(warm) -> None:
    lines = run().stdout.splitlines()
    assert lines[0].startswith(f"{warm['num_kernels']} kernels are ready after ")
    assert lines[0].endswith(f"{warm['cpu']}: 0 compiled, {warm['num_kernels']} found. Directories:")
    assert [line.strip() for line in lines[1:]] == warm["directories"]


def test_a_read_only_cache_directory_is_an_error_of_one_line(tmp_path) -> None:
    (tmp_path / "file").touch()
    ended = run(NUMBA_CACHE_DIR=str(tmp_path / "file" / "cache"))
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"fleet-sparse: NUMBA_CACHE_DIR: {tmp_path}/file/cache/")
    assert "(Not a directory)" in line


def test_kernels_that_check_bounds_are_refused() -> None:
    ended = run(NUMBA_BOUNDSCHECK="1")
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("fleet-sparse: NUMBA_BOUNDSCHECK: ")
