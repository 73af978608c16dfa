from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from fleet_sparse.worker.deferred_interrupt import DeferredInterrupt


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


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
