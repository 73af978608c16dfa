"""Run by scripts/test in a venv that has the wheel: is the package whole, with and without Paddle?

python -P check_installed.py without_paddle|with_paddle
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from pathlib import Path

import fleet_sparse

NEEDS_PADDLE = (
    *("fleet_sparse.plugin", "fleet_sparse.nn", "fleet_sparse.transpiler", "fleet_sparse.models"),
    *("fleet_sparse.tools.parity", "fleet_sparse.serving.onnx_export", "fleet_sparse.serving.paddle_export"),
    *("fleet_sparse.serving.paddle_network", "fleet_sparse.serving.predictor", "fleet_sparse.serving.onnx_network"),
    "fleet_sparse.tools.chaos.counting",
)
NEEDS_AN_EXTRA = ("fleet_sparse.tools.authority",)


def check(*, has_paddle: bool) -> None:
    """Imports every module that should be importable."""
    home = Path(fleet_sparse.__file__).parent
    assert sys.prefix in str(home), f"{home} is not the installed package"
    assert (importlib.util.find_spec("paddle") is not None) is has_paddle
    for name in ("py.typed", "wire/control.proto", "wire/control_pb2.pyi"):
        assert (home / name).is_file(), f"{name} is not in the wheel"

    modules = [found.name for found in pkgutil.walk_packages(fleet_sparse.__path__, "fleet_sparse.", onerror=_raise)]
    for part in (
        "core",
        "wire",
        "snapshot",
        "worker",
        "serving",
        "plugin",
        "transpiler",
        "pserver",
        "models",
        "tools",
        "cli",
    ):
        assert f"fleet_sparse.{part}" in modules, f"part {part} is not in the wheel"
    for name in modules:
        if name in NEEDS_AN_EXTRA:
            continue
        if not name.endswith(".__main__") and (has_paddle or not name.startswith(NEEDS_PADDLE)):
            importlib.import_module(name)
    assert ("paddle" in sys.modules) is has_paddle

    if has_paddle:
        fleet_sparse.install()
        return
    message = ""
    try:
        fleet_sparse.install()
    except (fleet_sparse.InstallError, ModuleNotFoundError) as error:
        message = str(error)
    assert "paddle" in message, "install() without Paddle does not say what is missing"


def _raise(name: str) -> None:
    if not name.startswith(NEEDS_PADDLE):
        raise ImportError(name)


if __name__ == "__main__":
    check(has_paddle={"with_paddle": True, "without_paddle": False}[sys.argv[1]])
