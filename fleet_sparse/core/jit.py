"""Compiles kernels. This module and `intrinsics` are the only ones of `core` that know Numba.

A kernel is a top-level function of arrays and numbers. It declares its types, releases the GIL, checks no bounds
(`NUMBA_BOUNDSCHECK=1` checks them) and keeps IEEE arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import llvmlite.binding
from numba import config, njit, types
from numba.core.dispatcher import Dispatcher

_Function = TypeVar("_Function", bound=Callable[..., Any])

# An input may be a view of a received frame: not writable, at any address.
_READ = {"readonly": True, "aligned": False}
INT64_IN = types.Array(types.int64, 1, "C", **_READ)
INT32_IN = types.Array(types.int32, 1, "C", **_READ)
UINT32_IN = types.Array(types.uint32, 1, "C", **_READ)
UINT8_IN = types.Array(types.uint8, 1, "C", **_READ)
UINT16_IN = types.Array(types.uint16, 1, "C", **_READ)
FLOAT32_IN = types.Array(types.float32, 1, "C", **_READ)
FLOAT64_IN = types.Array(types.float64, 1, "C", **_READ)
INT64S = types.Array(types.int64, 1, "C")
INT64S_2D = types.Array(types.int64, 2, "C")
INT32S = types.Array(types.int32, 1, "C")
UINT8S = types.Array(types.uint8, 1, "C")
UINT16S = types.Array(types.uint16, 1, "C")
UINT32S = types.Array(types.uint32, 1, "C")
UINT64S = types.Array(types.uint64, 1, "C")
FLOAT32S = types.Array(types.float32, 1, "C")
FLOAT64S = types.Array(types.float64, 1, "C")
INT64 = types.int64
FLOAT64 = types.float64
FLOAT32 = types.float32
UINT64 = types.uint64
BOOL = types.boolean
NOTHING = types.void

_kernels: list[tuple[Any, Any]] = []


def kernel(*arguments: object, result: Any = NOTHING) -> Callable[[_Function], _Function]:
    """Makes a kernel of a function whose arguments have these types, and registers it for `compile_kernels`.

    Nothing is compiled yet: a kernel that is called before `compile_kernels` is compiled by that call.
    """

    def decorate(function: _Function) -> _Function:
        dispatcher = njit(nogil=True, error_model="numpy")(function)
        _kernels.append((dispatcher, result(*arguments)))
        return dispatcher  # type: ignore[no-any-return]  # Numba has no types

    return decorate


def inlined(function: _Function) -> _Function:
    """Makes a function that is compiled into every kernel that calls it."""
    return njit(inline="always", error_model="numpy")(function)  # type: ignore[no-any-return]  # Numba has no types


class Compiled(NamedTuple):
    """A kernel that can be called without compiling anything.

    Attributes:
        name: Name of its function.
        is_found: True if its machine code was loaded; False if it was compiled.
        cache: The cache that was opened for it; None if there is none.
    """

    name: str
    is_found: bool
    cache: Any


def cpu_name() -> str:
    """The kind of CPU that machine code is made for, as LLVM names it."""
    return str(config.CPU_NAME or llvmlite.binding.get_host_cpu_name())


def num_to_compile() -> int:
    """Number of registered kernels that `compile_kernels` has not compiled yet."""
    return len(_kernels)


def address_of(function: Callable[..., Any], arguments: tuple[object, ...]) -> int:
    """Returns the address of the machine code of a kernel with these argument types, to be called by `kernel_at`.

    It is 0 if the function is no kernel of these types.
    """
    if not isinstance(function, Dispatcher):
        return 0
    found = function.overloads.get(arguments)
    if found is None and function._can_compile:
        function.compile(arguments)
        found = function.overloads.get(arguments)
    if found is None or found.signature.return_type != NOTHING:
        return 0
    return int(found.library.get_pointer_to_function(found.fndesc.llvm_cfunc_wrapper_name))


def compile_kernels(open_cache: Callable[[Callable[..., Any]], Any]) -> Iterator[Compiled]:
    """Compiles every registered kernel for its declared types, or loads it from its cache.

    Afterwards no call of a kernel compiles anything: a call whose arguments do not have the declared types raises
    `TypeError`.

    Args:
        open_cache: Returns the cache of a function's machine code, as Numba's dispatchers take one, or None.
    """
    while _kernels:
        # In the order of their definition: a kernel that calls others is compiled after them, and finds them.
        dispatcher, signature = _kernels[0]
        was_called = signature.args in dispatcher.overloads
        cache = open_cache(dispatcher.py_func)
        if cache is not None:
            dispatcher._cache = cache
        dispatcher.compile(signature)
        dispatcher.disable_compile()
        del _kernels[0]
        if not was_called:
            yield Compiled(dispatcher.__name__, bool(dispatcher.stats.cache_hits), cache)
