"""Bound executors: copies of Paddle's executor that run one program many times."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import paddle

_SERIAL = "FLAGS_new_executor_serial_run"
_NEW_IR = "FLAGS_enable_pir_api"


@dataclass
class _Shared:
    """The state that the bound executors of one executor share."""

    caches: list[Any] = field(default_factory=list)
    """Paddle's cache of compiled programs, of each of them."""
    scope: Any = None
    """The scope whose values they shared last."""
    inner_scopes: list[Any] = field(default_factory=list)
    """Scopes inside it for the other values of each but the first one."""


_shared: WeakKeyDictionary[Any, _Shared] = WeakKeyDictionary()


class _FirstProgram:
    """Stands for an executor's cache of compiled programs, and answers each run with what the first one found.

    The key of Paddle's cache is the text of the whole program, which it writes again for each run.

    Args:
        cache: Paddle's cache.
        number: Number of the executor among those that run at once.
        inner_scope: Scope in which the program is run in place of the one that is named; None for that one.
    """

    def __init__(self, cache: Any, number: int, inner_scope: Any) -> None:
        self._cache = cache
        self._number = number
        self._inner_scope = inner_scope
        self._found: Any = None

    def get_pir_program_and_executor(
        self,
        program: Any,
        feed: Any,
        fetch_list: Any,
        feed_var_name: str,
        fetch_var_name: str,
        place: Any,
        scope: Any,
        plan: Any,
    ) -> Any:
        """Returns what the first call found, as Paddle's cache would for the same program."""
        if self._found is None:
            if self._inner_scope is not None:
                scope = self._inner_scope
                fetch_var_name += f".{self._number}."  # fetched values lie in the outermost scope, by this name
                for name in feed:  # else Paddle binds the inputs that the outer scope has
                    scope.var(name).get_tensor()
            self._found = self._cache.get_pir_program_and_executor(
                program, feed, fetch_list, feed_var_name, fetch_var_name, place, scope, plan
            )
        return self._found

    def clear(self) -> None:
        """Does nothing: `bound_copies` drops whole caches."""


def bound_copies(executor: Any, scope: Any, number: int) -> list[Any]:
    """Returns copies of an executor, of its class, which may run at once, each on one thread.

    They share the values of `scope`, such as parameters; each has its own inputs and results. Every run of a copy has
    to be like its first one: with the same program, names of inputs, fetched values, and `scope`. What Paddle compiles
    lives as long as `executor`, for the copies of a later call.
    """
    shared = _shared.setdefault(executor, _Shared())
    if shared.scope is not scope:  # Paddle's caches know scopes by their addresses, which others may have later
        shared.scope, shared.inner_scopes, shared.caches = scope, [], []
    while len(shared.caches) < number:
        shared.caches.append(type(executor._executor_cache)())
    while len(shared.inner_scopes) < number - 1:
        shared.inner_scopes.append(scope.new_scope())
    inner_scopes = [None, *shared.inner_scopes]
    return [
        _bound_copy(executor, *each) for each in zip(shared.caches[:number], range(number), inner_scopes, strict=False)
    ]


def _bound_copy(executor: Any, cache: Any, number: int, inner_scope: Any) -> Any:
    bound = copy.copy(executor)
    bound._executor_cache = _FirstProgram(cache, number, inner_scope)
    if inner_scope is not None:
        feed_data = bound._pir_feed_data
        bound._pir_feed_data = lambda program, feed, scope, infos: feed_data(program, feed, inner_scope, infos)
    return bound


@contextmanager
def serial_ops() -> Iterator[None]:
    """Programs that are compiled in this block run their ops one after the other, on the thread that runs them."""
    before = paddle.get_flags(_SERIAL)
    paddle.set_flags({_SERIAL: True})
    try:
        yield
    finally:
        paddle.set_flags(before)


@contextmanager
def new_ir_in_threads() -> Iterator[None]:
    """Threads that first call Paddle in this block run programs of its new IR.

    Paddle reads the flag from the environment in each thread, and the script may have changed it since the import.
    """
    before = os.environ.get(_NEW_IR)
    os.environ[_NEW_IR] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NEW_IR]
        else:
            os.environ[_NEW_IR] = before
