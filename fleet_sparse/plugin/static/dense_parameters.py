"""DenseParameters: the dense parameters of one program as one flat array."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle.base import core
from paddle.base.libpaddle import pir

from fleet_sparse.core.decay import Decay
from fleet_sparse.core.dense_spec import DenseSpec, Segment
from fleet_sparse.core.rules import summary
from fleet_sparse.errors import FleetSparseError, PlanError

from ..optimizer_config import OptimizerConfig, read_decay
from .accumulators import Accumulators, power_after, updates_until


class DenseParameters(NamedTuple):
    """Parameters of a program and their places in one flat array."""

    spec: DenseSpec
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the parameters, in the order of `spec.segments`."""
    is_trained: bool
    """True if an optimizer trains them. Otherwise the array is frozen: the pservers only store its values."""
    accumulators: tuple[Accumulators, ...] = ()
    """One for each parameter if Paddle's optimizer trains them in the program; empty if the pservers do."""

    @property
    def is_local(self) -> bool:
        """True if Paddle's optimizer trains them in the program."""
        return bool(self.accumulators)

    @property
    def names(self) -> list[str]:
        """Names of the parameters, in the order of `spec.segments`."""
        return [segment.name for segment in self.spec.segments]

    def read(self, scope: Any) -> NDArray[np.float32]:
        """Returns the values in `scope`, `(spec.num_values,)` float32.

        Raises:
            FleetSparseError: A parameter has no value there.
        """
        return np.concatenate([self._value(scope, name) for name in self.names])

    def write(self, scope: Any, values: NDArray[np.float32]) -> None:
        """Sets the parameters in `scope` to `values`, `(spec.num_values,)`."""
        for segment, shape in zip(self.spec.segments, self.shapes, strict=True):
            part = values[segment.offset : segment.offset + segment.size].reshape(shape)
            scope.find_var(segment.name).get_tensor().set(np.ascontiguousarray(part), core.CPUPlace())

    def has_values(self, scope: Any) -> bool:
        """Returns whether all parameters, and their accumulators if there are any, have values in `scope`."""
        of_optimizer = [
            name for each in self.accumulators for name in (*each.states, *(name for name, _ in each.powers))
        ]
        return all(has_value(scope, name) for name in [*self.names, *of_optimizer])

    def read_states(self, scope: Any) -> NDArray[np.float32]:
        """Returns the optimizer's states in `scope`, `(num_states, spec.num_values)` float32.

        Raises:
            FleetSparseError: A parameter has no state there.
        """
        states = np.empty((self.spec.update_rule.num_states, self.spec.num_values), np.float32)
        for segment, each in zip(self.spec.segments, self.accumulators, strict=True):
            for state, name in zip(states, each.states, strict=True):
                state[segment.offset : segment.offset + segment.size] = self._value(scope, name)
        return states

    def write_states(self, scope: Any, states: NDArray[np.float32], num_updates: int) -> None:
        """Sets the optimizer's states in `scope`, `(num_states, spec.num_values)`, as after `num_updates` updates."""
        for segment, shape, each in zip(self.spec.segments, self.shapes, self.accumulators, strict=True):
            for state, name in zip(states, each.states, strict=True):
                part = state[segment.offset : segment.offset + segment.size].reshape(shape)
                _tensor(scope, name).set(np.ascontiguousarray(part), core.CPUPlace())
            for name, beta in each.powers:
                power = np.full(_tensor(scope, name).shape(), power_after(beta, num_updates), np.float32)
                _tensor(scope, name).set(power, core.CPUPlace())

    def num_updates(self, scope: Any, counted: int) -> int:
        """The number of updates that the powers of the betas in `scope` stand for.

        `counted` is returned if a rule has no such powers, or they no longer change.
        """
        powers = self.accumulators[0].powers
        if not powers:
            return counted
        name, beta = powers[-1]  # the last one changes longest
        return updates_until(beta, self._value(scope, name)[0], counted)

    def _value(self, scope: Any, name: str) -> NDArray[np.float32]:
        tensor = _tensor(scope, name)
        if tensor is None:
            raise FleetSparseError(
                f"dense {self.spec.name!r}: {name!r} has no value in the scope in which it was trained last, should "
                "have one. Keep the values there; to continue from a snapshot, run the startup program in a new scope "
                "and call fleet.load_model(dirname, 0) in it"
            )
        return np.asarray(tensor, np.float32).reshape(-1)


def check_parameters(parameters: Iterable[pir.Value]) -> None:
    """Refuses dense parameters that cannot be trained on pservers.

    Raises:
        PlanError: A parameter has another dtype than float32, or a regularizer that is not supported.
    """
    for parameter in parameters:
        if not is_float32(parameter):
            raise PlanError(f"parameter {parameter.name!r}: dtype is {parameter.dtype}, should be float32")
        _own_decay(parameter)


def is_float32(parameter: Any) -> bool:
    """Returns whether the dtype is float32; by name, because FLAGS_enable_pir_api also selects the class of dtypes."""
    return str(parameter.dtype) == str(paddle.float32)


def trained_parameters(name: str, parameters: Sequence[pir.Value], optimizer: OptimizerConfig) -> DenseParameters:
    """The array `name` of these parameters, at least one, in this order."""
    return _flattened(name, parameters, optimizer, is_trained=True)


def frozen_parameters(name: str, parameters: Sequence[pir.Value]) -> DenseParameters:
    """The array `name` of parameters without a gradient, at least one, in this order."""
    return _flattened(name, parameters, OptimizerConfig("overwrite", ()), is_trained=False)


def summed_parameters(name: str, parameters: Sequence[pir.Value], decay: float, *, is_local: bool) -> DenseParameters:
    """The array `name` of parameters that are decaying sums, at least one, in this order; `is_local` as its own."""
    dense = _flattened(name, parameters, OptimizerConfig(summary.name, (("decay", decay),)), is_trained=True)
    return dense._replace(accumulators=(Accumulators((), ()),) * len(parameters)) if is_local else dense


def _flattened(
    name: str, parameters: Sequence[pir.Value], optimizer: OptimizerConfig, *, is_trained: bool
) -> DenseParameters:
    segments, shapes, offset = [], [], 0
    for parameter in parameters:
        shape = tuple(int(size) for size in parameter.shape)
        size = int(np.prod(shape, dtype=np.int64))
        multiplier = float((parameter.optimize_attr or {}).get("learning_rate", 1.0))
        own_decay = _own_decay(parameter) if is_trained else None
        decay = optimizer.decay if own_decay is None else own_decay
        bounds = optimizer.bounds_of(needs_clip(parameter))
        segments.append(Segment(parameter.name, offset, size, multiplier, *decay, *bounds))
        shapes.append(shape)
        offset += size
    spec = DenseSpec(
        name=name, rule=optimizer.rule, hyperparameters=optimizer.hyperparameters, segments=tuple(segments)
    )
    return DenseParameters(spec, tuple(shapes), is_trained)


def needs_clip(parameter: pir.Value) -> bool:
    """Returns `need_clip` of the parameter's ParamAttr."""
    return getattr(parameter, "need_clip", True) is not False


def _own_decay(parameter: pir.Value) -> Decay | None:
    return read_decay(f"parameter {parameter.name!r}: ParamAttr regularizer", parameter.regularizer)


def has_value(scope: Any, name: str) -> bool:
    """Returns whether the parameter `name` has a value in `scope`."""
    return _tensor(scope, name) is not None


def restore(spec: DenseSpec, scope: Any, values: NDArray[np.float32], wanted: Container[str]) -> set[str]:
    """Sets the parameters of the array that are `wanted` and in `scope`; returns their names.

    Raises:
        PlanError: A parameter has another size than on the pservers.
    """
    done = set()
    for segment in spec.segments:
        tensor = _tensor(scope, segment.name) if segment.name in wanted else None
        if tensor is None:
            continue
        shape = tuple(tensor.shape())
        if int(np.prod(shape, dtype=np.int64)) != segment.size:
            raise PlanError(
                f"parameter {segment.name!r}: shape is {list(shape)}, the pservers have {segment.size} values of it. "
                "Build the model as it was saved, or give the parameter another name"
            )
        part = values[segment.offset : segment.offset + segment.size].reshape(shape)
        tensor.set(np.ascontiguousarray(part), core.CPUPlace())
        done.add(segment.name)
    return done


def _tensor(scope: Any, name: str) -> Any:
    variable = scope.find_var(name)
    if variable is None:
        return None
    tensor = variable.get_tensor()
    return tensor if tensor._is_initialized() else None
