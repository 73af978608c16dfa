"""The sources of the project, and what each of them imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("core", "wire", "snapshot", "serving", "worker", "plugin", "transpiler", "pserver", "models", "tools", "cli")
LINKED = ("transpiler", "pserver", "models")
"""Parts whose folder is next to `fleet_sparse/`, which links to it."""


class Import(NamedTuple):
    """One import of one module, anywhere in a file."""

    path: Path
    line: int
    module: str
    """As written, without the leading dots."""
    names: tuple[str, ...]
    """What `from module import ...` takes; empty for `import module`."""
    level: int
    """Leading dots."""

    def __str__(self) -> str:
        what = "." * self.level + self.module
        text = f"from {what} import {', '.join(self.names)}" if self.names else f"import {what}"
        return f"{self.path.relative_to(ROOT)}:{self.line}: {text}"


def files_of(part: str) -> list[Path]:
    """The modules of a part, generated ones among them."""
    return sorted((ROOT / part if part in LINKED else ROOT / "fleet_sparse" / part).rglob("*.py"))


def root_modules() -> list[Path]:
    """The modules of `fleet_sparse/` that belong to no part."""
    return sorted((ROOT / "fleet_sparse").glob("*.py"))


def imports_of(path: Path) -> Iterator[Import]:
    """Every import of a file, those inside functions and under `if TYPE_CHECKING` too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(path, node.lineno, alias.name, (), 0)
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            yield Import(path, node.lineno, node.module or "", names, node.level)


def modules_named(found: Import) -> list[str]:
    """The modules that an absolute import may load: `from a import b` may be `a.b`."""
    return [found.module, *(f"{found.module}.{name}" for name in found.names)]
