from __future__ import annotations

import os
import signal
import threading

import pytest

from fleet_sparse.worker.net.deferred_interrupt import DeferredInterrupt
from support.forks import in_child
from support.threads import in_threads

pytestmark = pytest.mark.usefixtures("default_handler")


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_comes_when_the_block_ends() -> None:
    passed = []
    with pytest.raises(KeyboardInterrupt), DeferredInterrupt(lambda: None) as deferred:
        assert not deferred.is_pending
        interrupt()
        assert deferred.is_pending
        passed.append(1)
    assert passed == [1]


def test_an_interrupt_wakes_whoever_waits_inside() -> None:
    woken = []
    with pytest.raises(KeyboardInterrupt), DeferredInterrupt(lambda: woken.append(1)):
        interrupt()
        assert woken == [1]


def test_the_handler_that_was_there_is_called_and_stays() -> None:
    calls = []

    def own(number: int, frame: object) -> None:
        calls.append(number)

    signal.signal(signal.SIGINT, own)
    with DeferredInterrupt(lambda: None):
        interrupt()
        assert calls == []
    assert calls == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is own


def test_of_two_blocks_the_outer_one_raises() -> None:
    passed = []
    with pytest.raises(KeyboardInterrupt), DeferredInterrupt(lambda: None) as outer:
        with DeferredInterrupt(lambda: None) as inner:
            interrupt()
            assert (inner.is_pending, outer.is_pending) == (True, False)
        assert outer.is_pending
        passed.append(1)
    assert passed == [1]


def test_without_an_interrupt_nothing_is_called() -> None:
    with DeferredInterrupt(lambda: None):
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_takes_the_place_of_an_error_of_the_block() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, DeferredInterrupt(lambda: None):
        interrupt()
        raise OSError
    assert isinstance(caught.value.__context__, OSError)


def test_an_ignored_interrupt_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with DeferredInterrupt(lambda: None) as deferred:
        interrupt()
        assert not deferred.is_pending
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_other_threads_leave_the_handler_alone() -> None:
    seen = []

    def enter() -> None:
        with DeferredInterrupt(lambda: None):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


# Forks


def handler_name() -> str:
    """Of the handler that a SIGINT finds."""
    return getattr(signal.getsignal(signal.SIGINT), "__name__", "")


def test_a_child_forked_inside_is_interrupted_at_once() -> None:
    """The lock that a wake-up takes may be held by a thread that the child does not have."""
    read, write = os.pipe()
    with DeferredInterrupt(lambda: os.write(write, b"woken ")):
        assert in_child(interrupt) == "KeyboardInterrupt"
    os.close(write)
    with os.fdopen(read) as pipe:
        assert pipe.read() == ""


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_forked_by_another_thread_is_interrupted_at_once() -> None:
    with DeferredInterrupt(lambda: None):
        assert in_threads(lambda: in_child(interrupt)) == ["KeyboardInterrupt"]


def test_a_child_forked_inside_of_two_blocks_is_in_neither() -> None:
    with DeferredInterrupt(lambda: None), DeferredInterrupt(lambda: None):
        assert in_child(handler_name) == "default_int_handler"


def test_a_child_forked_inside_may_have_blocks_of_its_own() -> None:
    def with_block() -> bool:
        with DeferredInterrupt(lambda: None) as own:
            interrupt()
            os.write(write, b"passed" if own.is_pending else b"")
        return True

    read, write = os.pipe()
    with DeferredInterrupt(lambda: None):
        assert in_child(with_block) == "KeyboardInterrupt"
    assert os.read(read, 10) == b"passed"
    for end in (read, write):
        os.close(end)


def test_an_interrupt_noted_before_a_fork_is_the_parents_alone() -> None:
    raised, child = False, os.getpid()
    try:
        with DeferredInterrupt(lambda: None):
            interrupt()
            child = os.fork()
    except KeyboardInterrupt:
        raised = True
    finally:
        if child == 0:
            os._exit(raised)
    assert raised
    assert os.waitpid(child, 0)[1] == 0
