"""How kernels are compiled: the only module, with `intrinsics`, that knows Numba.

A kernel is a top-level function of arrays and numbers. It declares its types, releases the GIL, checks no bounds
(`NUMBA_BOUNDSCHECK=1` checks them) and keeps IEEE arithmetic. Its machine code is cached on disk beside its module. The
cache notices a change of the kernel's own module only: after a change to a function that is inlined into kernels of
other modules, delete `__pycache__`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from numba import config, njit, types

_log = logging.getLogger(__name__)
_Function = TypeVar("_Function", bound=Callable[..., Any])

# What is only read may be a view of a received frame: not writable, at any address.
_READ = {"readonly": True, "aligned": False}
INT64_IN = types.Array(types.int64, 1, "C", **_READ)
INT32_IN = types.Array(types.int32, 1, "C", **_READ)
UINT32_IN = types.Array(types.uint32, 1, "C", **_READ)
UINT16_IN = types.Array(types.uint16, 1, "C", **_READ)
FLOAT32_IN = types.Array(types.float32, 1, "C", **_READ)
FLOAT64_IN = types.Array(types.float64, 1, "C", **_READ)
INT64S = types.Array(types.int64, 1, "C")
INT32S = types.Array(types.int32, 1, "C")
UINT8S = types.Array(types.uint8, 1, "C")
UINT16S = types.Array(types.uint16, 1, "C")
UINT32S = types.Array(types.uint32, 1, "C")
FLOAT32S = types.Array(types.float32, 1, "C")
FLOAT64S = types.Array(types.float64, 1, "C")
INT64 = types.int64
UINT64 = types.uint64
BOOL = types.boolean
NOTHING = types.void

# Machine code that checks bounds must neither be stored in the cache nor be replaced by code from it that does not.
_CACHE = not config.BOUNDSCHECK

_kernels: list[tuple[Any, Any]] = []


def kernel(*arguments: object, result: Any = NOTHING) -> Callable[[_Function], _Function]:
    """Makes a kernel of a function whose arguments have these types, and registers it for `compile_kernels`."""

    def decorate(function: _Function) -> _Function:
        try:
            dispatcher = njit(nogil=True, cache=_CACHE, error_model="numpy")(function)
        except RuntimeError:  # no directory for its machine code can be written
            _warn_of_no_cache()
            dispatcher = njit(nogil=True, error_model="numpy")(function)
        _kernels.append((dispatcher, result(*arguments)))
        return dispatcher  # type: ignore[no-any-return]

    return decorate


@cache
def _warn_of_no_cache() -> None:
    """Once."""
    _log.warning("kernels cannot be cached, so this process compiles them. Set NUMBA_CACHE_DIR to a directory of yours")


def inlined(function: _Function) -> _Function:
    """Makes a function that kernels call, compiled into each of them."""
    return njit(inline="always", error_model="numpy")(function)  # type: ignore[no-any-return]


def compile_kernels() -> None:
    """Compiles every registered kernel for its declared types, or loads it; from then on no call compiles anything.

    A call whose arguments do not fit the declared types then raises `TypeError`.
    """
    while _kernels:
        dispatcher, signature = _kernels[-1]
        dispatcher.compile(signature)
        dispatcher.disable_compile()
        _kernels.pop()
