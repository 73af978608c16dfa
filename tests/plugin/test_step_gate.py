from __future__ import annotations

import signal
import sys
import threading
from contextlib import contextmanager
from functools import partial

import pytest

from fleet_sparse.errors import FleetSparseError
from fleet_sparse.plugin import step_gate
from fleet_sparse.plugin.step_gate import StepGate
from support.threads import in_threads

LONG_S = 60.0
SOON_S = 5.0
TRACED = (step_gate.__file__, contextmanager.__code__.co_filename, __file__)


def use(gate, name):
    with getattr(gate, name)():
        pass


def interrupted_at(number, name, gate):
    """Returns whether SIGINT at this bytecode of a use of the gate, counted from 1, raised KeyboardInterrupt."""
    passed = 0

    def trace(frame, event, _):
        nonlocal passed
        if frame.f_code.co_filename not in TRACED:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            passed += 1
            if passed == number:
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 reports no bytecode unless a frame asked before `settrace`
    try:
        sys.settrace(trace)
        use(gate, name)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.usefixtures("default_handler")
@pytest.mark.parametrize("name", ["step", "closed"])
def test_ctrl_c_at_any_bytecode_leaves_the_gate_open(name):
    number, gate = 1, StepGate(SOON_S)
    while interrupted_at(number, name, gate):
        in_threads(partial(use, gate, "closed"), partial(use, gate, "step"))
        number, gate = number + 1, StepGate(SOON_S)
    assert number > 100


def test_a_step_waits_until_the_gate_opens():
    gate, began = StepGate(LONG_S), threading.Event()

    def step():
        with gate.step():
            began.set()

    thread = threading.Thread(target=step)
    with gate.closed():
        thread.start()
        assert not began.wait(0.05)
    thread.join()
    assert began.is_set()


def test_a_step_that_waits_too_long_raises():
    gate = StepGate(0.01)
    with gate.closed(), pytest.raises(FleetSparseError, match=r"exe\.run: .*FLEET_SPARSE_BARRIER_S"), gate.step():
        pass
    use(gate, "step")


def test_a_close_names_the_number_of_steps_that_do_not_end():
    gate = StepGate(0.01)
    with gate.step(), gate.step(), pytest.raises(FleetSparseError, match="2 runs"), gate.closed():
        pass
    use(gate, "step")


def test_two_closes_exclude_each_other():
    gate = StepGate(0.01)
    with gate.closed(), pytest.raises(FleetSparseError), gate.closed():
        pass
    use(gate, "closed")
