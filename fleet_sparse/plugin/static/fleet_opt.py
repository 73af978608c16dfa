"""`Program._fleet_opt`: the options of a trainer over data sets, which scripts read and write on a Program."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from paddle.base.libpaddle import pir

_options: WeakKeyDictionary[pir.Program, dict[str, Any]] = WeakKeyDictionary()


def options_of(program: pir.Program) -> dict[str, Any]:
    """The options of `program`, which the caller may change."""
    return _options.setdefault(program, {})


def _set_options(program: pir.Program, options: dict[str, Any]) -> None:
    _options[program] = dict(options)


fleet_opt = property(options_of, _set_options)
"""The property that replaces `pir.Program._fleet_opt`, because `Program.clone` would share a plain attribute."""
