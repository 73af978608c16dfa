"""Commands that run together. Pservers are started by tests of all parts."""

from __future__ import annotations

import os
import sys

import pytest

from fleet_sparse.errors import FleetSparseError
from fleet_sparse.local_pservers import Child, run_together

WAIT = "import time; time.sleep(600)"


def python(name, code, **variables):
    return Child(name, [sys.executable, "-c", code], variables)


def test_outputs_are_in_the_order_of_the_commands() -> None:
    slower = python("a", "import time; time.sleep(0.3); print('a')")
    assert run_together([slower, python("b", "print('b')")], limit_s=60) == ["a\n", "b\n"]


def test_each_has_its_own_variables() -> None:
    show = "import os; print(os.environ['WHO'])"
    children = [python(name, show, WHO=name) for name in ("first", "second")]
    assert run_together(children, limit_s=60) == ["first\n", "second\n"]


def test_output_of_any_length_is_read() -> None:
    (output,) = run_together([python("a", "print('x' * 1_000_000)")], limit_s=60)
    assert len(output) == 1_000_001


# All the error paths


def test_failure_names_the_child_and_its_last_line() -> None:
    fails = python("worker 1", "import sys; print('a warning', file=sys.stderr); sys.exit('table: it is gone')")
    with pytest.raises(FleetSparseError, match=r"^worker 1: .* 1: table: it is gone$"):
        run_together([python("worker 0", WAIT), fails], limit_s=60)


def test_child_killed_without_output_is_named_with_its_signal() -> None:
    killed = python("worker 0", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(FleetSparseError, match=r"^worker 0: .* -9"):
        run_together([killed], limit_s=60)


def test_failure_of_one_child_ends_the_others(tmp_path) -> None:
    path = tmp_path / "pid"
    waits = f"import os; open('{path}.new', 'w').write(str(os.getpid())); os.rename('{path}.new', '{path}'); {WAIT}"
    fails = f"import os, sys, time\nwhile not os.path.exists('{path}'): time.sleep(0.01)\nsys.exit('broken')"
    with pytest.raises(FleetSparseError, match="broken"):
        run_together([python("waits", waits), python("fails", fails)], limit_s=60)
    with pytest.raises(ProcessLookupError):
        os.kill(int(path.read_text()), 0)


def test_children_that_run_too_long_are_named() -> None:
    children = [python("worker 0", WAIT), python("worker 1", ""), python("worker 2", WAIT)]
    with pytest.raises(FleetSparseError, match=r"^worker 0, worker 2: .* 2 s"):
        run_together(children, limit_s=2)
