"""`fleet-sparse warm-up`: kernels compiled ahead of the first job."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleet_sparse.errors import SettingError

from .own_rules import add_own_rules
from .terminal import AS_IS, COUNT, bar, console, print_json

if TYPE_CHECKING:
    from fleet_sparse.warm_up import ReadyKernel

_VARIABLE = "NUMBA_CACHE_DIR"


def warm_up(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Compiles all kernels, so that no job has to: a pserver then starts in a second, and not in ten more.

    For images of containers: `RUN fleet-sparse warm-up`. The kernels of update rules in FLEET_SPARSE_RULES are among
    them. They are kept beside the installed package, where that cannot be written in the user's cache directory, or
    where NUMBA_CACHE_DIR says. Machine code is for this kind of CPU; on another one it is compiled again.
    """
    import fleet_sparse.tools.snapshots.kernels_text  # noqa: F401  # for the kernels that it registers
    from fleet_sparse.core.jit import cpu_name, num_to_compile
    from fleet_sparse.kernel_cache import IS_CACHED
    from fleet_sparse.warm_up import ready_kernels

    if not IS_CACHED:
        raise SettingError("NUMBA_BOUNDSCHECK is set: kernels that check bounds are not kept. Unset it")
    add_own_rules()
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
    """That the kernel's machine code lies where it should.

    Raises:
        SettingError: It does not, because it cannot be written there.
    """
    if ready.cache is None:
        raise SettingError(f"kernel {ready.name!r} cannot be kept: its module is no file. Install it as one")
    asked_for = bool(os.environ.get(_VARIABLE))
    directory = ready.cache.directories[0] if asked_for else ready.cache.directories[-1]
    if ready.cache.home is None or (asked_for and ready.cache.home != directory.path):
        raise SettingError(
            f"{_VARIABLE if asked_for else 'kernels'}: {directory.path} cannot be written ({directory.refusal}). "
            f"Set {_VARIABLE} to a directory that can, and to the same one for jobs"
        )


def _show(found: dict[str, Any]) -> None:
    console.print(
        f"{found['num_kernels']} kernels are ready after {found['seconds']:.1f} s, for {found['cpu']}: "
        f"{found['num_compiled']} compiled, {found['num_found']} found. They lie in",
        **AS_IS,
    )
    for directory in found["directories"]:
        console.print(f"  {directory}", **AS_IS)
