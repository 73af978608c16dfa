from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys

import numba
import numpy as np
import pytest

from fleet_sparse import kernel_cache
from fleet_sparse.core import jit
from fleet_sparse.kernel_cache import KernelCache
from fleet_sparse.warm_up import warm_up
from support.jobs import environment

pytestmark = pytest.mark.skipif(bool(numba.config.BOUNDSCHECK), reason="code that checks bounds is not cached")

SOURCE = "def twice(values):\n    values[0] *= 2\n"
PROGRAM = """
import logging
logging.basicConfig()
import numpy
from fleet_sparse.core import jit
from fleet_sparse.warm_up import ready_kernels
import a_kernel
twice = jit.kernel(jit.INT64S)(a_kernel.twice)
(ready,) = (each for each in ready_kernels(trains=False) if each.name == "twice")
values = numpy.array([21])
twice(values)
print(values[0], ready.is_found, ready.cache.home)
"""
BEGIN = "import ctypes, os, resource, sys; {}; os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])"
# Root may write to read-only directories unless it drops the capability: PR_CAPBSET_DROP, CAP_DAC_OVERRIDE.
OBEY_PERMISSIONS = "ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)"
WRITE_NOTHING = "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))"


@pytest.fixture
def module(tmp_path):
    """A directory with a module of one function."""
    directory = tmp_path / "module"
    directory.mkdir()
    (directory / "a_kernel.py").write_text(SOURCE)
    return directory


@pytest.fixture
def nowhere(tmp_path):
    """A path that nobody can create, not even root."""
    path = tmp_path / "file"
    path.touch()
    return path / "nowhere"


def function_in(module):
    spec = importlib.util.spec_from_file_location("a_kernel", module / "a_kernel.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded.twice


def kernel_in(module):
    """A dispatcher with a KernelCache, compiled or loaded."""
    dispatcher = numba.njit(function_in(module))
    dispatcher._cache = KernelCache(dispatcher.py_func)
    dispatcher.compile((jit.INT64S,))
    return dispatcher


def is_found(dispatcher):
    return bool(dispatcher.stats.cache_hits)


def run(module, first="pass", **variables):
    """Output and log of `PROGRAM` in a new process, which first executes a statement."""
    ended = subprocess.run(
        [sys.executable, "-c", BEGIN.format(first), PROGRAM],
        env=environment(**variables, PYTHONPATH=":".join([str(module), *filter(None, sys.path)])),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split(), ended.stderr


def test_miss_is_told_before_the_code_is_compiled(module) -> None:
    compiled = []
    for _ in range(2):
        dispatcher = numba.njit(function_in(module))
        dispatcher._cache = KernelCache(
            dispatcher.py_func, lambda dispatcher=dispatcher: compiled.append(len(dispatcher.signatures))
        )
        dispatcher.compile((jit.INT64S,))
    assert compiled == [0]


def test_code_lies_beside_its_module_and_is_found_there(module) -> None:
    first, second = kernel_in(module), kernel_in(module)
    assert (is_found(first), is_found(second)) == (False, True)
    assert first._cache.home == second._cache.home == module / "__pycache__"


def test_code_lies_in_numba_cache_dir_alone_if_it_is_set(module, tmp_path, monkeypatch) -> None:
    kernel_in(module)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    first, second = kernel_in(module), kernel_in(module)
    assert (is_found(first), is_found(second)) == (False, True)
    assert first._cache.home.parent == tmp_path / "cache"


def test_unwritable_numba_cache_dir_falls_back_to_pycache(module, nowhere, monkeypatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(nowhere))
    first, second = kernel_in(module), kernel_in(module)
    assert (is_found(first), is_found(second)) == (False, True)
    assert second._cache.home == module / "__pycache__"
    assert [directory.refusal for directory in second._cache.directories] == ["Not a directory", ""]


def test_code_of_a_changed_module_is_not_found(module) -> None:
    kernel_in(module)
    (module / "a_kernel.py").write_text(SOURCE + "# longer\n")
    assert not is_found(kernel_in(module))


def test_code_is_not_found_once_core_changed(module, monkeypatch) -> None:
    kernel_in(module)
    monkeypatch.setattr(kernel_cache, "_digest_of_core", lambda: b"another")
    assert not is_found(kernel_in(module))


def test_code_in_a_read_only_directory_is_found(module, nowhere) -> None:
    run(module)
    home = module / "__pycache__"
    home.chmod(0o555)
    found, log = run(module, OBEY_PERMISSIONS, HOME=str(nowhere), XDG_CACHE_HOME=str(nowhere))
    home.chmod(0o755)
    assert found == ["42", "True", str(home)]
    assert log == ""


def test_new_code_goes_past_a_read_only_directory_to_the_users(module, tmp_path) -> None:
    home = module / "__pycache__"
    home.mkdir()
    home.chmod(0o555)
    runs = [run(module, OBEY_PERMISSIONS, XDG_CACHE_HOME=str(tmp_path / "users"))[0] for _ in range(2)]
    home.chmod(0o755)
    assert [found[:2] for found in runs] == [["42", "False"], ["42", "True"]]
    assert all(found[2].startswith(str(tmp_path / "users" / "numba")) for found in runs)


def test_kernel_that_cannot_be_cached_works_and_is_logged_once(module) -> None:
    found, log = run(module, WRITE_NOTHING)  # as on a full disk
    assert found == ["42", "False", "None"]
    assert log.count("NUMBA_CACHE_DIR") == 1


def test_warm_up_logs_what_it_compiles_and_where_it_lies(module, caplog) -> None:
    warm_up()
    twice = jit.kernel(jit.INT64S)(function_in(module))
    with caplog.at_level(logging.INFO, "fleet_sparse.warm_up"):
        warm_up()
        warm_up()
    before, after = caplog.records
    assert before.args == (1,)
    assert after.args[0] == 1
    assert after.args[2] == str(module / "__pycache__")
    values = np.array([21])
    twice(values)
    assert values[0] == 42


NO_FILE = """
import logging
logging.basicConfig()
import numpy
from fleet_sparse.core import jit
from fleet_sparse.warm_up import ready_kernels
names = {}
exec(compile("def twice(values): values[0] *= 2", "/proc/nowhere/kernels.py", "exec"), names)
twice = jit.kernel(jit.INT64S)(names["twice"])
(ready,) = (each for each in ready_kernels(trains=False) if each.name == "twice")
values = numpy.array([21])
twice(values)
print(values[0])
"""


def test_kernel_whose_source_is_not_a_file_is_not_cached() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", NO_FILE],
        env={"HOME": "/proc/nowhere", "PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.stdout == "42\n", ended.stderr
    assert "NUMBA_CACHE_DIR" in ended.stderr


CALL = """
import sys
import numpy
from fleet_sparse.core.initializer import constant, initial_rows
from fleet_sparse.core.kernels_initial import write_initial_rows
print(len(write_initial_rows.signatures), "fleet_sparse.kernel_cache" in sys.modules)
initial_rows(constant(1.0), numpy.arange(3), dim=2, seed=0, salt=0)
print(len(write_initial_rows.signatures), write_initial_rows._cache.cache_path)
"""


def test_core_compiles_nothing_at_import_and_has_no_cache() -> None:
    printed = subprocess.run([sys.executable, "-c", CALL], check=True, capture_output=True, text=True, timeout=100)
    assert printed.stdout.split() == ["0", "False", "1", "None"]
