"""Checks that Paddle's version and flags train correctly."""

from __future__ import annotations

import re

import paddle

from fleet_sparse.errors import InstallError

OLDEST, FIRST_UNSUPPORTED = (3, 3, 1), (3, 4)
"""The versions of the extra `cpu` in pyproject.toml."""

_WRONG_FLAGS = {
    "FLAGS_use_mkldnn": "Paddle then computes wrong gradients of rows",
    "FLAGS_use_onednn": "Paddle then computes wrong gradients of rows",
}


def check_version(version: str) -> None:
    """Raises `InstallError` unless `version` is a supported version of Paddle."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if not OLDEST <= numbers < FIRST_UNSUPPORTED:
        oldest, first = (".".join(map(str, numbers)) for numbers in (OLDEST, FIRST_UNSUPPORTED))
        raise InstallError(
            f"paddle {version}: is not supported, should be at least {oldest} and below {first}. "
            f"pip install 'paddlepaddle>={oldest},<{first}'"
        )


def check_flags() -> None:
    """Raises `InstallError` if a flag of Paddle is set with which training is wrong; the message names it."""
    if not paddle.get_flags("FLAGS_enable_pir_api")["FLAGS_enable_pir_api"]:
        raise InstallError(
            "FLAGS_enable_pir_api: is 0, and programs of the old IR are not supported. Leave it out, or, if the "
            "script sets it before it imports paddle, call fleet_sparse.install() above this line"
        )
    for flag, reason in _WRONG_FLAGS.items():
        try:
            is_on = paddle.get_flags(flag)[flag]
        except ValueError:  # Paddle was built without the flag
            continue
        if is_on:
            raise InstallError(f"{flag}: is on, should be off: {reason}. Turn it off")
