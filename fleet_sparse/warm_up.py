"""Compilation of all kernels before a process serves or trains."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

# Importing a module registers its kernels.
from fleet_sparse.core import (  # noqa: F401
    entries,
    kernels_batch,
    kernels_bitmap,
    kernels_changes,
    kernels_clip,
    kernels_clocks,
    kernels_columns,
    kernels_cow_view,
    kernels_decay,
    kernels_dense,
    kernels_half,
    kernels_index,
    kernels_initial,
    kernels_memory,
    kernels_ownership,
    kernels_row_asks,
    kernels_rows,
    kernels_sketch,
    rules,
)
from fleet_sparse.core.jit import compile_kernels, num_to_compile
from fleet_sparse.kernel_cache import IS_CACHED, KernelCache, open_cache
from fleet_sparse.wire import kernels_answer  # noqa: F401  # as above

_OF_WORKERS = (
    "fleet_sparse.core.kernels_cache",
    "fleet_sparse.core.kernels_copies",
    "fleet_sparse.core.kernels_lines",
    "fleet_sparse.core.kernels_serving_cache",
    "fleet_sparse.wire.kernels_lane",
)

__all__ = ["ReadyKernel", "ready_kernels", "warm_up", "without_linear_algebra"]

_LINEAR_ALGEBRA = "scipy.linalg"

_log = logging.getLogger(__name__)


class ReadyKernel(NamedTuple):
    """A kernel that can be called without compiling anything.

    Attributes:
        name: Name of its function.
        is_found: True if its machine code was loaded; False if this process compiled it.
        cache: Its machine code on disk; None if there can be none.
    """

    name: str
    is_found: bool
    cache: KernelCache | None


def warm_up(*, trains: bool = True, on_progress: Callable[[], object] = lambda: None) -> None:
    """Compiles every kernel, or loads it from the disk cache; does nothing the second time.

    Without `trains`, in a process that only serves, those of data sets and of the lane are left out. `on_progress` is
    called after each.

    It takes a second or less with a filled cache and ten without. Every process calls it before it serves or trains:
    a kernel that is called without is compiled by that call, and is not cached.
    """

    @cache  # logs it once
    def announce() -> None:
        _log.info(
            "compiling up to %d kernels, once for this machine and version; all of them take 10 to 30 s, longer on a "
            "busy machine",
            num_to_compile(),
        )

    begun_at = time.monotonic()
    compiled = []
    for kernel in ready_kernels(trains=trains, on_miss=announce):
        on_progress()
        if not kernel.is_found:
            compiled.append(kernel.cache)
    if compiled:
        homes = sorted({str(cache.home) for cache in compiled if cache is not None and cache.home is not None})
        _log.info(
            "compiled %d kernels in %.1f s; `fleet-sparse warm-up` does so in advance. They are cached in %s",
            len(compiled),
            time.monotonic() - begun_at,
            ", ".join(homes) or "no directory",
        )


@contextmanager
def without_linear_algebra() -> Iterator[None]:
    """Hides SciPy's linear algebra from Numba while the block loads the first kernel.

    Numba imports it, if it is installed, for kernels that multiply matrices, and no kernel of this project does. It
    takes 15 MB and a tenth of a second. No kernel of this process can multiply matrices later.
    """
    is_imported = _LINEAR_ALGEBRA in sys.modules
    if not is_imported:
        sys.modules[_LINEAR_ALGEBRA] = None  # type: ignore[assignment]  # an import raises ImportError
    try:
        yield
    finally:
        if not is_imported:
            del sys.modules[_LINEAR_ALGEBRA]


def ready_kernels(*, trains: bool = True, on_miss: Callable[[], object] = lambda: None) -> Iterator[ReadyKernel]:
    """Compiles or loads every kernel that is not ready yet, one at a time.

    `trains` is as in `warm_up`; `on_miss` is called before each that is compiled.
    """

    def opened(function: Callable[..., Any]) -> KernelCache | None:
        found = open_cache(function, on_miss)
        if found is None:
            on_miss()
        return found

    if trains:
        for name in _OF_WORKERS:
            import_module(name)  # registers its kernels
    for name, is_found, kernel_cache in compile_kernels(opened):
        if IS_CACHED and (kernel_cache is None or kernel_cache.home is None):
            _warn_once()
        yield ReadyKernel(name, is_found, kernel_cache)


@cache
def _warn_once() -> None:
    _log.warning(
        "kernels cannot be cached, so this process compiles them. Set NUMBA_CACHE_DIR to a directory that it can write"
    )
