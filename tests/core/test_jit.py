from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import logging
logging.basicConfig()
from fleet_sparse.core import jit
text = "def twice(values): values[0] *= 2"
names = {}
exec(compile(text, "/proc/nowhere/kernels.py", "exec"), names)
twice = jit.kernel(jit.INT64S)(names["twice"])
jit.compile_kernels()
import numpy
values = numpy.array([21])
twice(values)
print(values[0])
"""


def test_a_kernel_whose_source_is_no_file_works_and_is_not_cached() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={"HOME": "/proc/nowhere", "PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.stdout == "42\n", ended.stderr
    assert "kernels cannot be cached, so this process compiles them. Set NUMBA_CACHE_DIR" in ended.stderr
