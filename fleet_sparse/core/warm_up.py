"""Getting the kernels ready."""

from __future__ import annotations

import logging
import time

from . import (
    kernels_batch,
    kernels_bitmap,
    kernels_clip,
    kernels_columns,
    kernels_cow_view,
    kernels_decay,
    kernels_half,
    kernels_index,
    kernels_initial,
    kernels_memory,
    kernels_ownership,
    kernels_rows,
    rules,
)
from .jit import compile_kernels

__all__ = ["warm_up"]

_log = logging.getLogger(__name__)

_WITH_KERNELS = (
    kernels_batch,
    kernels_bitmap,
    kernels_clip,
    kernels_columns,
    kernels_cow_view,
    kernels_decay,
    kernels_half,
    kernels_index,
    kernels_initial,
    kernels_memory,
    kernels_ownership,
    kernels_rows,
    rules,
)


def warm_up() -> None:
    """Compiles every kernel, or loads it from the disk cache; does nothing the second time.

    A second or less with a filled cache, ten without. A process that serves calls it before the first request.
    """
    begun_at = time.monotonic()
    compiled = [each for each in compile_kernels() if not each.is_found]
    if compiled:
        homes = sorted({str(each.home) for each in compiled if each.home is not None})
        _log.info(
            "%d kernels compiled in %.1f s, which `fleet-sparse warm-up` does ahead; kept in %s",
            len(compiled),
            time.monotonic() - begun_at,
            ", ".join(homes) or "no directory",
        )
