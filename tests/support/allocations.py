"""Places in the sources that allocate memory whose size is not that of something in memory already."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

_OF_SIZE = {f"np.{name}" for name in ("empty", "zeros", "ones", "full", "arange", "fromiter", "resize")}
_OF_SIZE |= {"bytearray", "bytes", "mmap.mmap"}
_REPEATING = {"np.repeat", "np.tile", "np.pad", "np.broadcast_to"}
_READING = {"recv", "read", "readexactly", "lend"}
_UNLIMITED = {"recv_multipart", "recv_pyobj", "readall"}
_UNPACKING = {"struct.unpack", "struct.unpack_from", "struct.iter_unpack"}


def allocations_in(path: Path) -> Iterator[tuple[str, int, str]]:
    """Yields function, line and text of each place; those of fixed size, or of the size of an object, are left out."""
    yield from _within(ast.parse(path.read_text(encoding="utf-8")), "")


def function_named(path: Path, name: str) -> ast.AST:
    """Returns a function, `Class.method` if it is one of a class."""
    node: ast.AST = ast.parse(path.read_text(encoding="utf-8"))
    for part in name.split("."):
        node = next(each for each in ast.iter_child_nodes(node) if getattr(each, "name", None) == part)
    return node


def _within(node: ast.AST, function: str) -> Iterator[tuple[str, int, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield from _within(child, f"{function}.{child.name}".lstrip("."))
            continue
        if isinstance(child, (ast.Call, ast.BinOp)) and any(map(_is_free, _sizes_of(child))):
            yield function, child.lineno, ast.unparse(child)
        yield from _within(child, function)


def _sizes_of(node: ast.Call | ast.BinOp) -> list[ast.expr]:
    """Returns the expressions that are the size of what a call or `[x] * n` allocates; none if it allocates nothing."""
    if isinstance(node, ast.BinOp):
        is_sequence = [
            isinstance(side, ast.List) or (isinstance(side, ast.Constant) and isinstance(side.value, (bytes, str)))
            for side in (node.left, node.right)
        ]
        return [node.left, node.right] if isinstance(node.op, ast.Mult) and any(is_sequence) else []
    name = ast.unparse(node.func)
    if name in _OF_SIZE:
        return node.args[:1]
    if name in _REPEATING or name in _UNPACKING:
        return [*node.args[:1], *node.args[1:2]] if name in _REPEATING else node.args[:1]
    if isinstance(node.func, ast.Attribute) and node.func.attr in _READING | _UNLIMITED:
        return [node.func] if node.func.attr in _UNLIMITED or not node.args else node.args[:1]
    return []


def _is_free(size: ast.AST) -> bool:
    """Returns True if a size depends on a variable: not on constants, `len`, shapes and comparisons alone."""
    if isinstance(size, ast.Call) and ast.unparse(size.func) == "len":
        return False
    if isinstance(size, ast.Attribute):
        return size.attr not in ("shape", "size") and not size.attr.isupper()
    if isinstance(size, ast.Name):
        return not size.id.isupper()
    if isinstance(size, (ast.List, ast.Constant)):
        return False
    if isinstance(size, ast.Subscript) and _is_shape(size.value):
        return False
    return any(map(_is_free, ast.iter_child_nodes(size)))


def _is_shape(value: ast.AST) -> bool:
    return isinstance(value, ast.Attribute) and value.attr == "shape"
