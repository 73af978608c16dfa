"""Inserts an op whose body is a Python function into a Paddle Program.

This is the only module that knows how. Paddle 3.3's Python-op dialect (`_C_ops._run_python_op`) has four traps, all
handled here: the op's name selects its closure, so it must be unique; a body's tensors need a tracer on the thread
that runs it; `infer_meta` must return a tuple and never raise, or the process aborts; and in dygraph mode the call
itself aborts. The op has no gradient, so a rewrite happens before `append_backward`.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import _C_ops
from paddle.base import core
from paddle.base.libpaddle import pir

from fleet_sparse.errors import PlanError

from .first_predictor import open_first_predictor

DIALECT = "py_op."
_DTYPES = {"float32": paddle.float32, "int32": paddle.int32, "int64": paddle.int64}

_CPU = core.CPUPlace()
_DLPACK_CPU = 1, 0  # device type and index

_numbers = itertools.count()
_failures: dict[str, BaseException] = {}  # op name -> exception of its body, which Executor.run loses


class _PaddleThread(threading.local):
    """The tracer of a thread that runs bodies.

    A thread of Paddle's executor has a Python thread state only while it runs Python: each call would map its stack
    anew and lose its locals. A reference that is never released keeps the state until the process ends.
    """

    def __init__(self) -> None:
        ctypes.pythonapi.PyGILState_Ensure()
        self.tracer = core.Tracer()


_thread = _PaddleThread()


class _Exported(tuple[Any]):
    """A tensor on the CPU, as NumPy reads it. Paddle's own methods check devices and streams first, in Python."""

    __slots__ = ()

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        return self[0].get_tensor()._to_dlpack_versioned()

    def __dlpack_device__(self) -> tuple[int, int]:
        return _DLPACK_CPU


class OutSpec(NamedTuple):
    """An output of an op: `shape` with -1 for sizes known at run time only, `dtype` one of float32, int32, int64."""

    shape: tuple[int, ...]
    dtype: str


class Reserved(NamedTuple):
    """Memory of Paddle for an output of a later run of the same op."""

    tensor: Any
    array: NDArray[Any]
    """A writable view of the tensor."""


class Outputs:
    """Allocates the outputs of one run of an op in memory that Paddle owns, so that the body writes them in place.

    Args:
        dtypes: Paddle's dtype of each output.
    """

    def __init__(self, dtypes: Sequence[Any]) -> None:
        self._dtypes = dtypes
        self._tensors: list[Any] = [None] * len(dtypes)

    def allocate(self, index: int, shape: Sequence[int]) -> NDArray[Any]:
        """A writable view of output `index`, uninitialised, of the given `shape`."""
        tensor = self._tensors[index] = _C_ops.empty(list(shape), self._dtypes[index], _CPU)
        return np.from_dlpack(_Exported((tensor,)))

    def reserve(self, index: int, shape: Sequence[int]) -> Reserved:
        """As `allocate`, for output `index` of a later run, which hands it over by `use`."""
        tensor = _C_ops.empty(list(shape), self._dtypes[index], _CPU)
        return Reserved(tensor, np.from_dlpack(_Exported((tensor,))))

    def use(self, index: int, reserved: Reserved) -> None:
        """Makes output `index` what an earlier run reserved. At most one run may use it."""
        self._tensors[index] = reserved.tensor

    def set_number(self, index: int, number: int) -> None:
        """Makes output `index` one number, of shape `(1,)`."""
        self._tensors[index] = _C_ops.full([1], number, self._dtypes[index], _CPU)

    def tensors(self) -> tuple[Any, ...]:
        """The tensors to hand to Paddle, every one allocated."""
        for tensor in self._tensors:
            if tensor is None:
                missing = [index for index, each in enumerate(self._tensors) if each is None]
                raise RuntimeError(f"outputs {missing} were not allocated by the op's body")
        return tuple(self._tensors)


Body = Callable[[list[NDArray[Any]], Outputs], None]
"""Body of an op: reads `inputs` (views of Paddle's tensors), allocates and fills `outputs`. May run on any thread."""


def emit(
    name: str, body: Body, inputs: Sequence[pir.Value], outputs: Sequence[OutSpec], attributes: Mapping[str, str]
) -> tuple[pir.Value, ...]:
    """Inserts an op at the insertion point of the default main program; returns its output values.

    Args:
        name: Kind of the op, as `describe` shows it; a number is added to make it unique.
        body: Called at each run of the op.
        inputs: Values the body reads.
        outputs: One entry per output.
        attributes: Text attributes of the op, which survive `Program.clone`; `op.str_attr` reads them.

    Raises:
        PlanError: Not in static graph mode.
    """
    if paddle.in_dynamic_mode():
        raise PlanError(f"{name}: Paddle is in dygraph mode. Call paddle.enable_static() before building the model")
    open_first_predictor()
    unique_name = f"{name}_{next(_numbers)}"
    dtypes = [_DTYPES[spec.dtype] for spec in outputs]
    metas = tuple(
        paddle.static.MetaTensor(shape=list(spec.shape), dtype=dtype)
        for spec, dtype in zip(outputs, dtypes, strict=True)
    )

    def run(*tensors: Any) -> tuple[Any, ...]:
        core._switch_tracer(_thread.tracer)
        try:
            inputs = []
            for tensor in tensors:  # views of tensors on the CPU, copies of tensors elsewhere
                on_cpu = tensor.place.is_cpu_place()
                inputs.append(np.from_dlpack(_Exported((tensor,))) if on_cpu else np.asarray(tensor.numpy()))
            results = Outputs(dtypes)
            body(inputs, results)
            return results.tensors()
        except BaseException as error:
            _failures[DIALECT + unique_name] = error
            # Paddle prints this error and then raises one of its own without the cause, which is kept above.
            raise RuntimeError(f"{name}: {type(error).__name__}: {error}") from None
        finally:
            core._switch_tracer(None)

    values = _C_ops._run_python_op(
        *inputs,
        name=unique_name,
        input_names=[f"in{index}" for index in range(len(inputs))],
        output_names=[f"out{index}" for index in range(len(outputs))],
        attrs={"infer_meta_fn_ptr": lambda *_: metas, "fn_ptr": run},
        inplace_map={},
    )
    values = tuple(values) if isinstance(values, (list, tuple)) else (values,)
    for key, text in attributes.items():
        values[0].get_defining_op().set_str_attr(key, text)
    return values


def name_of(op: pir.Operation) -> str | None:
    """The name that was given to `emit`, without the number; None for an op that `emit` did not make."""
    name = str(op.name())
    if not name.startswith(DIALECT):
        return None
    return name.removeprefix(DIALECT).rpartition("_")[0]


def take_failure() -> BaseException | None:
    """Returns and forgets the first exception that an op's body raised since the last call; None without one."""
    for name in list(_failures):
        failure = _failures.pop(name, None)
        if failure is not None:
            _failures.clear()
            return failure
    return None
