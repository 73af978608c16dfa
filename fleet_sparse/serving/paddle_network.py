"""Networks as files of stock Paddle: saves, loads and runs them.

Of this room, this module and `paddle_export` import Paddle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle.base.libpaddle import pir
from paddle.static.io import load_inference_model, save_inference_model  # not those that install() replaces

Arrays = Mapping[str, NDArray[Any]]


class LoadedNetwork(NamedTuple):
    """A network that `save_network` saved."""

    program: pir.Program
    results: list[pir.Value]
    values: dict[str, NDArray[Any]]
    """Values of its parameters, by name."""


def save_network(
    path: Path, program: pir.Program, inputs: Sequence[pir.Value], results: Sequence[pir.Value], values: Arrays
) -> None:
    """Writes `<path>.json` and `<path>.pdiparams`.

    Args:
        path: Path without an ending.
        program: The network.
        inputs: Its inputs.
        results: Its results.
        values: Values of its parameters, by name.
    """
    scope = paddle.static.Scope()
    for parameter in program.global_block().all_parameters():
        value = np.ascontiguousarray(values[parameter.name])
        scope.var(parameter.name).get_tensor().set(value, paddle.CPUPlace())
    with paddle.static.scope_guard(scope):
        executor = paddle.static.Executor(paddle.CPUPlace())
        save_inference_model(str(path), list(inputs), list(results), executor, program=program)


def load_network(path: Path) -> LoadedNetwork:
    """Reads what `save_network` wrote."""
    scope = paddle.static.Scope()
    with paddle.static.scope_guard(scope):
        program, _, results = load_inference_model(str(path), paddle.static.Executor(paddle.CPUPlace()))
    names = [parameter.name for parameter in program.global_block().all_parameters()]
    return LoadedNetwork(program, results, {name: np.array(scope.find_var(name).get_tensor()) for name in names})


@contextmanager
def static_mode() -> Iterator[None]:
    """Makes a `with` block run in static graph mode. The mode is that of all threads."""
    is_dynamic = paddle.in_dynamic_mode()
    paddle.enable_static()
    try:
        yield
    finally:
        if is_dynamic:
            paddle.disable_static()


def values_of(path: Path) -> dict[str, NDArray[Any]]:
    """Returns the values of the parameters of a saved network, in static graph mode or in dygraph."""
    with static_mode():
        return load_network(path).values


def save_values(file: Path, values: Arrays) -> None:
    """Writes the `.pdiparams` of a saved network again, with other values. It touches no state that threads share.

    Args:
        file: Path with its ending.
        values: Values of all parameters of the network, by name.
    """
    scope, tensors, names = paddle.static.Scope(), [], sorted(values)
    for name in names:
        tensors.append(scope.var(name).get_tensor())
        tensors[-1].set(np.ascontiguousarray(values[name]), paddle.CPUPlace())
    paddle.base.core.save_combine_func(tensors, names, str(file), True, False, False)


class OpenNetwork:
    """A saved network, opened by `paddle.inference`. One thread at a time may use it.

    Args:
        path: Path without an ending; the files are not needed afterwards.
        values: Path of other `.pdiparams`; None for those of the network.
        has_onednn: False to compute without oneDNN; None for Paddle's default.

    Attributes:
        inputs: Names of its inputs.
    """

    def __init__(self, path: Path, values: Path | None = None, *, has_onednn: bool | None = None) -> None:
        from paddle import inference

        config = inference.Config(f"{path}.json", str(values or f"{path}.pdiparams"))
        config.disable_gpu()
        config.disable_glog_info()
        config.set_cpu_math_library_num_threads(1)
        if has_onednn is False:
            config.disable_mkldnn()
        self._predictor = inference.create_predictor(config)
        self.inputs = tuple(self._predictor.get_input_names())

    def run(self, feed: Arrays) -> list[NDArray[Any]]:
        """Returns the results in their order. Inputs that it does not have are ignored."""
        predictor = self._predictor
        for name in self.inputs:
            predictor.get_input_handle(name).copy_from_cpu(np.ascontiguousarray(feed[name]))
        predictor.run()
        return [predictor.get_output_handle(name).copy_to_cpu() for name in predictor.get_output_names()]


def predict(path: Path, feed: Arrays, *, has_onednn: bool | None = None) -> list[NDArray[Any]]:
    """Runs a saved network once by `paddle.inference`.

    Args:
        path: Path without an ending.
        feed: Inputs by name; others than those of the network are ignored.
        has_onednn: As of an `OpenNetwork`.

    Returns:
        The results in their order.
    """
    return OpenNetwork(path, has_onednn=has_onednn).run(feed)
