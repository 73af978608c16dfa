"""The split network of a model for onnxruntime, with other values of its parameters for each version."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.transpiler.inference import inputs_of, with_onnx_ops

from .onnx_export import converted
from .paddle_network import Arrays, load_network, save_network, save_values, static_mode

_log = logging.getLogger(__name__)

_CONVERTED = "converted"


class OnnxNetworks:
    """Converts a saved network once, by paddle2onnx in a process of its own, and opens it with other values.

    Args:
        path: Path without an ending; the files are needed until the last `open`.

    Raises:
        ModuleNotFoundError: A package of the extra `onnx` is not installed.
        FleetSparseError: paddle2onnx failed.
    """

    def __init__(self, path: Path) -> None:
        import onnx  # noqa: F401  # so that their absence is known before anything is computed
        import onnxruntime  # noqa: F401
        import paddle2onnx  # noqa: F401

        self._path = path.with_name(f"{path.name}.{_CONVERTED}")
        with static_mode():
            program, results, self._values = load_network(path)
            with_onnx_ops(program)
            save_network(self._path, program, list(inputs_of(program).values()), results, self._values)
        self._model = converted(self._path)
        self._places = self._places_of_values()
        if missing := sorted(self._values.keys() - self._places.keys()):
            _log.info("parameters %s are not in the ONNX model as they are; each version is converted", missing)

    def open(self, values: Arrays) -> OnnxNetwork:
        """Returns the network with these values of its parameters, by name."""
        from onnx import numpy_helper

        changed = [
            name for name, value in values.items() if np.asarray(value).tobytes() != self._values[name].tobytes()
        ]
        if any(name not in self._places for name in changed):
            save_values(self._path.with_name(f"{self._path.name}.pdiparams"), {**self._values, **values})
            return OnnxNetwork(converted(self._path))
        for name in changed:
            place = self._places[name]
            initializer = self._model.graph.initializer[place]
            initializer.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(values[name]), initializer.name))
        self._values = {**self._values, **values}
        return OnnxNetwork(self._model)

    def _places_of_values(self) -> dict[str, int]:
        """Returns the initializer of each parameter that the ONNX model has unchanged."""
        from onnx import numpy_helper

        places = {}
        for place, initializer in enumerate(self._model.graph.initializer):
            value = self._values.get(initializer.name)
            found = numpy_helper.to_array(initializer)
            if value is not None and (found.dtype, found.shape, found.tobytes()) == (
                value.dtype,
                value.shape,
                value.tobytes(),
            ):
                places[initializer.name] = place
        return places


class OnnxNetwork:
    """A network, opened by onnxruntime. Safe to use from several threads; each call computes in its own thread.

    Args:
        model: The ONNX model.

    Attributes:
        inputs: Names of its inputs.
    """

    def __init__(self, model: Any) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        self.inputs = tuple(each.name for each in self._session.get_inputs())

    def run(self, feed: Arrays) -> list[NDArray[Any]]:
        """Returns the results in their order. Inputs that it does not have are ignored."""
        results = self._session.run(None, {name: np.ascontiguousarray(feed[name]) for name in self.inputs})
        return [np.asarray(each) for each in results]
