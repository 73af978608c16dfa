"""Reads a `config.yaml` of PaddleRec as options of `models/train.py`.

The model is that of the directory, as `models/rank/dnn/config.yaml` says `dnn`; paths are relative to the directory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fleet_sparse.core.mode import ASYNC, GEO, SYNC


class ConfigOptions(NamedTuple):
    """Options that a configuration gives."""

    arguments: list[str]
    """Command line of `models/train.py`."""
    unused: list[str]
    """Settings that change nothing here, as `runner.print_interval`."""


def _count(option: str) -> Callable[[Any], list[str]]:
    return lambda value: [option, str(int(value))]


_OPTIONS: Mapping[str, Callable[[Any], list[str]]] = {
    "runner.train_batch_size": _count("--batch-size"),
    "runner.epochs": _count("--epochs"),
    "runner.seed": _count("--seed"),
    "hyper_parameters.sparse_feature_dim": _count("--dim"),
    "hyper_parameters.dense_input_dim": _count("--num-dense"),
    "hyper_parameters.fc_sizes": lambda widths: ["--hidden", *(str(int(width)) for width in widths)],
    "hyper_parameters.optimizer.class": lambda name: ["--optimizer", str(name).lower()],
    "hyper_parameters.optimizer.learning_rate": lambda rate: ["--learning-rate", str(float(rate))],
    # One slot is the label.
    "hyper_parameters.sparse_inputs_slots": lambda slots: ["--slots", ",".join(map(str, range(1, int(slots))))],
}
_DATA = ("runner.train_data_dir", "runner.test_data_dir")
_MODE, _GEO_STEP = "runner.sync_mode", "runner.geo_step"
_DEFAULT_GEO_STEP = 400


def read_config(path: Path) -> ConfigOptions:
    """Reads a configuration.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not YAML, a setting has another type, or its mode does not exist here.
    """
    settings = _flat(_parsed(path))
    arguments = ["--model", path.resolve().parent.name]
    used = {*_DATA, _MODE, _GEO_STEP}
    for name, option in _OPTIONS.items():
        if name in settings:
            used.add(name)
            try:
                arguments += option(settings[name])
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}: {name}: is {settings[name]!r}: {error}") from error
    files = [str(path.parent / settings[name]) for name in _DATA if name in settings]
    if files:
        arguments += ["--data", "slots", *files]
    arguments += _mode(path, settings)
    return ConfigOptions(arguments, sorted(settings.keys() - used))


def _mode(path: Path, settings: Mapping[str, Any]) -> list[str]:
    mode = settings.get(_MODE, ASYNC)
    if mode == GEO:
        return ["--mode", GEO, "--k-steps", str(settings.get(_GEO_STEP, _DEFAULT_GEO_STEP))]
    if mode not in (SYNC, ASYNC):
        raise ValueError(f"{path}: {_MODE}: is {mode!r}, should be {SYNC}, {ASYNC} or {GEO}")
    return ["--mode", mode]


def _parsed(path: Path) -> Any:
    try:
        import yaml  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise ValueError(f"{path}: PyYAML is not installed. pip install 'fleet-sparse[demo]'") from error
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: is not YAML: {error}") from error


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Settings by their path, as `runner.epochs`."""
    if not isinstance(tree, Mapping):
        return {prefix.removesuffix("."): tree} if prefix else {}
    return {name: value for key, below in tree.items() for name, value in _flat(below, f"{prefix}{key}.").items()}
