"""Getting the kernels ready."""

from __future__ import annotations

from . import (
    kernels_batch,
    kernels_capture,
    kernels_clip,
    kernels_decay,
    kernels_half,
    kernels_index,
    kernels_initial,
    kernels_memory,
    kernels_notes,
    kernels_rows,
    rules,
)
from .jit import compile_kernels

__all__ = ["warm_up"]

_WITH_KERNELS = (
    kernels_batch,
    kernels_capture,
    kernels_clip,
    kernels_decay,
    kernels_half,
    kernels_index,
    kernels_initial,
    kernels_memory,
    kernels_notes,
    kernels_rows,
    rules,
)


def warm_up() -> None:
    """Compiles every kernel, or loads it from the disk cache; does nothing the second time.

    A second or less with a filled cache, ten without. A process that serves calls it before the first request.
    """
    compile_kernels()
