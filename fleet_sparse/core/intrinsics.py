"""Intrinsics that kernels need and Numba lacks: prefetch, memcpy, an atomic write, and arrays and kernels at addresses.

An array at an address keeps nothing alive: the caller of the kernel does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array

_BYTES = ir.IntType(8).as_pointer()
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_FOR_READING, _FOR_WRITING = 0, 1
_KEEP_IN_ALL_CACHES = 3
_DATA = 1


def _address(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    pointer = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(pointer, [index]), _BYTES)


def _prefetch(access: int) -> Callable[[Any, Any, Any], Any]:
    def typed(typing_context: Any, array: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kind = ir.FunctionType(ir.VoidType(), [_BYTES, _I32, _I32, _I32])
            function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
            address = _address(context, builder, signature.args[0], *arguments)
            builder.call(function, [address, _I32(access), _I32(_KEEP_IN_ALL_CACHES), _I32(_DATA)])
            return context.get_dummy_value()

        return types.void(array, types.uint64), generate

    return typed


def _copy(typing_context: Any, target: Any, target_index: Any, source: Any, source_index: Any, count: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, to_index, from_, from_index, number = arguments
        kind = ir.FunctionType(ir.VoidType(), [_BYTES, _BYTES, _I64, ir.IntType(1)])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.memcpy.p0.p0.i64")
        item_size = context.get_abi_sizeof(context.get_data_type(signature.args[0].dtype))
        to_address = _address(context, builder, signature.args[0], to, to_index)
        from_address = _address(context, builder, signature.args[2], from_, from_index)
        builder.call(function, [to_address, from_address, builder.mul(number, _I64(item_size)), ir.IntType(1)(0)])
        return context.get_dummy_value()

    return types.void(target, types.uint64, source, types.uint64, types.uint64), generate


def _touch(typing_context: Any, array: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.bitcast(_address(context, builder, signature.args[0], *arguments), _I32.as_pointer())
        # LLVM would replace `atomicrmw or 0` by a load, and a load backs no page.
        builder.cmpxchg(pointer, _I32(0), _I32(0), "monotonic")
        return context.get_dummy_value()

    return types.void(array, types.uint64), generate


def array_at(array_type: Any) -> Callable[[Any, Any], Any]:
    """Returns the function `(address, length)` for kernels that makes a flat array of this type of memory."""

    def typed(typing_context: Any, address: Any, length: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            item_type = context.get_data_type(array_type.dtype)
            item_size = context.get_constant(types.intp, context.get_abi_sizeof(item_type))
            array = make_array(array_type)(context, builder)
            data = builder.inttoptr(arguments[0], item_type.as_pointer())
            populate_array(array, data, [arguments[1]], [item_size], item_size, None)
            return array._getvalue()

        return array_type(types.int64, types.int64), generate

    made: Callable[[Any, Any], Any] = intrinsic(typed)
    return made


def kernel_at(kernel_types: tuple[Any, ...]) -> Callable[..., None]:
    """Returns the function `(address, *arguments)` for kernels that calls the kernel at an address of `address_of`.

    The kernel has these argument types and returns nothing.
    """

    def typed(typing_context: Any, address: Any, arguments: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            kinds = [context.get_value_type(kind) for kind in kernel_types]
            kind = ir.FunctionType(context.get_value_type(types.none), kinds)
            function = builder.inttoptr(given[0], kind.as_pointer())
            builder.call(function, cgutils.unpack_tuple(builder, given[1], len(kernel_types)))
            return context.get_dummy_value()

        return types.void(types.int64, types.Tuple(kernel_types)), generate

    made: Callable[..., None] = intrinsic(typed)
    return made


prefetch_read: Callable[..., None] = intrinsic(_prefetch(_FOR_READING))
"""`prefetch_read(array, index)` prefetches the cache line of `array[index]`. Any index is allowed."""

prefetch_write: Callable[..., None] = intrinsic(_prefetch(_FOR_WRITING))
"""`prefetch_write(array, index)` does the same for a line that will be written."""

copy: Callable[..., None] = intrinsic(_copy)
"""`copy(target, target_index, source, source_index, count)` copies `count` elements; both arrays have one dtype."""

touch: Callable[..., None] = intrinsic(_touch)
"""`touch(array, index)` writes 0 to 4 bytes that are 0, atomically, so that the system backs the page with memory."""
