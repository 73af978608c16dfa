"""`fleet-sparse warm-up`: compiles the kernels before the first job."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleet_sparse.errors import SettingError

from .custom_rules import add_custom_rules
from .terminal import AS_IS, COUNT, bar, console, print_json

if TYPE_CHECKING:
    from fleet_sparse.warm_up import ReadyKernel

_VARIABLE = "NUMBA_CACHE_DIR"


def warm_up(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compiles all kernels, so that no process spends its first 10 to 30 seconds on that.

    Useful in container images: `RUN fleet-sparse warm-up`. Includes the kernels of the update rules in
    FLEET_SPARSE_RULES. Machine code is stored in NUMBA_CACHE_DIR if that is set, otherwise in the directory of the
    package, or in the user's cache directory if the package is read-only. It is specific to the CPU model; on another
    model the kernels are compiled again.
    """
    from fleet_sparse.core.jit import cpu_name, num_to_compile
    from fleet_sparse.kernel_cache import IS_CACHED
    from fleet_sparse.warm_up import ready_kernels

    if not IS_CACHED:
        raise SettingError("NUMBA_BOUNDSCHECK: is set, and kernels that check bounds are not stored. Unset it")
    add_custom_rules()
    begun_at = time.monotonic()
    ready: list[ReadyKernel] = []
    with bar("compiling", COUNT) as progress:
        progress.expect(num_to_compile())
        for each in ready_kernels():
            _check(each)
            ready.append(each)
            progress(len(ready))
    seconds = time.monotonic() - begun_at
    num_found = sum(each.is_found for each in ready)
    found = {
        "num_kernels": len(ready),
        "num_compiled": len(ready) - num_found,
        "num_found": num_found,
        "seconds": seconds,
        "cpu": cpu_name(),
        "directories": sorted({str(each.cache.home) for each in ready if each.cache is not None}),
    }
    if as_json:
        print_json(found)
    else:
        _show(found)


def _check(ready: ReadyKernel) -> None:
    """Checks where the kernel's machine code is stored.

    Raises:
        SettingError: It cannot be written to the directory where a job looks for it.
    """
    if ready.cache is None:
        raise SettingError(
            f"kernel {ready.name!r}: cannot be stored, because its module is not a file. Install it as a file"
        )
    asked_for = bool(os.environ.get(_VARIABLE))
    directory = ready.cache.directories[0] if asked_for else ready.cache.directories[-1]
    if ready.cache.home is None or (asked_for and ready.cache.home != directory.path):
        raise SettingError(
            f"{_VARIABLE if asked_for else 'kernels'}: {directory.path} cannot be written ({directory.refusal}). "
            f"Set {_VARIABLE} to a writable directory, and to the same one for jobs"
        )


def _show(found: dict[str, Any]) -> None:
    console.print(
        f"{found['num_kernels']} kernels are ready after {found['seconds']:.1f} s, for {found['cpu']}: "
        f"{found['num_compiled']} compiled, {found['num_found']} found. Directories:",
        **AS_IS,
    )
    for directory in found["directories"]:
        console.print(f"  {directory}", **AS_IS)
