"""The namespace: one copy of each module, loaded when it is asked for, and no Paddle in a pserver."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.sources import LINKED, PARTS, ROOT, files_of, root_modules


def run(code: str, *, cwd: Path = ROOT) -> str:
    """What a fresh interpreter prints, started in `cwd` as a user would start it."""
    result = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.parametrize("part", LINKED)
def test_part_is_a_link_to_the_folder_beside(part: str) -> None:
    link = ROOT / "fleet_sparse" / part
    assert link.is_symlink()
    assert link.readlink() == Path("..", part)


def test_attributes_of_fleet_sparse_are_loaded_on_first_use() -> None:
    loaded = run("import sys, fleet_sparse; print(*{name.split('.')[0] for name in sys.modules})").split()
    assert "fleet_sparse" in loaded
    assert not {"paddle", "numba", "numpy", "grpc", "zmq"} & set(loaded)


def test_errors_and_settings_load_without_numpy() -> None:
    code = "import sys, fleet_sparse as f; f.ShardUnavailable, f.Settings; print('numpy' in sys.modules)"
    assert run(code) == "False"


def test_a_pserver_loads_neither_paddle_nor_the_worker() -> None:
    code = """
import sys
import fleet_sparse.pserver.server
loaded = {".".join(name.split(".")[:2]) for name in sys.modules}
print(*sorted(loaded & {"paddle", "fleet_sparse.worker", "fleet_sparse.plugin", "fleet_sparse.transpiler"}))
"""
    assert run(code) == ""


def test_a_worker_loads_neither_paddle_nor_the_pserver() -> None:
    code = """
import sys
import fleet_sparse.worker.net.client, fleet_sparse.worker.control.control, fleet_sparse.worker.net.zmq_channel
loaded = {".".join(name.split(".")[:2]) for name in sys.modules}
print(*sorted(loaded & {"paddle", "fleet_sparse.pserver", "fleet_sparse.plugin", "fleet_sparse.transpiler"}))
"""
    assert run(code) == ""


def test_each_file_is_loaded_as_one_module() -> None:
    code = """
import collections, importlib, os, pkgutil, sys, warnings
warnings.simplefilter("ignore")  # Paddle's, at import
import fleet_sparse
for module in pkgutil.walk_packages(fleet_sparse.__path__, "fleet_sparse."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
homes = collections.defaultdict(list)
for name, module in list(sys.modules.items()):
    home = os.path.relpath(os.path.realpath(getattr(module, "__file__", None) or "/"))
    if home.split(os.sep)[0] in {"fleet_sparse", "transpiler", "pserver", "models"}:
        homes[home].append(name)
print(*(names for names in homes.values() if len(names) > 1))
assert any(name == "fleet_sparse.pserver.server" for names in homes.values() for name in names), homes
"""
    assert run(code) == ""


def listed_names(path: Path) -> tuple[str, ...] | None:
    """The `__all__` of a source, or nothing where there is none."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and [target.id for target in node.targets if isinstance(target, ast.Name)] == [
            "__all__"
        ]:
            return tuple(ast.literal_eval(node.value))
    return None


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "fleet_sparse" else ("fleet_sparse", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


LISTING = {
    module_of(path): names
    for path in [*root_modules(), *(path for part in PARTS for path in files_of(part))]
    if (names := listed_names(path)) is not None
}


@pytest.fixture(scope="module")
def missing() -> dict[str, list[str]]:
    """Of each module the names of its `__all__` that it has not, as a fresh interpreter finds them."""
    code = f"""
import importlib, json, warnings
warnings.simplefilter("ignore")  # Paddle's, at import
missing = {{}}
for name, names in sorted({LISTING!r}.items(), key=lambda item: item[0].count(".")):  # a package before what is in it
    module = importlib.import_module(name)
    missing[name] = [each for each in names if not hasattr(module, each)]
print(json.dumps(missing))
"""
    return json.loads(run(code))


@pytest.mark.parametrize("module", LISTING)
def test_all_has_names_that_are_there_once(module: str, missing: dict[str, list[str]]) -> None:
    names = LISTING[module]
    assert len(names) == len(set(names))  # ruff sorts them
    assert missing[module] == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    import fleet_sparse

    with pytest.raises(AttributeError, match="nope"):
        fleet_sparse.nope  # noqa: B018
