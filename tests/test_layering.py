"""Who may import whom (docs/architecture.md has the picture), and names of tests, read from the sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.sources import PARTS, ROOT, Import, files_of, imports_of, modules_named, root_modules

EVERYONE = {
    "control_socket",
    "counts",
    "credentials",
    "keys",
    "launch",
    "machine_memory",
    "net_addresses",
    "errors",
    "settings",
}
MAY_IMPORT = {
    "core": set(),
    "wire": {"core"},
    "snapshot": {"core"},
    "pserver": {"snapshot", "wire", "core", "warm_up", "custom_rules", "lifeline", "supervise"},
    "worker": {"wire", "core", "warm_up"},
    "transpiler": {"core"},
    "serving": {"transpiler", "worker", "wire", "snapshot", "core", "warm_up"},
    "plugin": {
        "transpiler",
        "serving",
        "worker",
        "snapshot",
        "core",
        "embedded",
        "warm_up",
        "custom_rules",
        "lifeline",
    },
    "models": {"plugin", "core"},
    "tools": {"plugin", "serving", "worker", "wire", "snapshot", "core", "local_pservers", "warm_up", "pserver"},
    "cli": {
        "tools",
        "serving",
        "snapshot",
        "core",
        "local_pservers",
        "warm_up",
        "kernel_cache",
        "custom_rules",
        "pserver",
    },
    # The modules beside the parts.
    "control_socket": set(),
    "counts": set(),
    "credentials": set(),
    "keys": set(),
    "launch": set(),
    "machine_memory": set(),
    "net_addresses": set(),
    "errors": set(),
    "settings": set(),
    "lifeline": set(),
    "supervise": {"lifeline"},
    "kernel_cache": {"core"},
    "warm_up": {"core", "wire", "kernel_cache"},
    "custom_rules": {"core"},
    "embedded": {"embedded_client", "worker", "pserver", "wire", "core", "warm_up"},
    "embedded_client": {"worker", "pserver", "wire", "core"},
    "local_pservers": set(),
    "nn": {"plugin"},
    "__init__": {"nn", "plugin", "transpiler"},
}
IMPORTS_PADDLE = {"plugin", "transpiler", "models", "tools", "serving"}


def home_of(path: Path) -> str:
    """The part that a source belongs to, or the name of a module beside the parts."""
    beneath = path.relative_to(ROOT).parts
    beneath = beneath[1:] if beneath[0] == "fleet_sparse" else beneath
    return beneath[0] if len(beneath) > 1 else path.stem


def targets_of(found: Import) -> set[str]:
    """The parts and modules of fleet_sparse that an absolute import names."""
    names = [module.split(".") for module in modules_named(found)]
    return {name[1] for name in names if name[0] == "fleet_sparse" and len(name) > 1 and name[1] in MAY_IMPORT}


def imports_from(home: str) -> list[Import]:
    paths = files_of(home) if home in PARTS else [ROOT / "fleet_sparse" / f"{home}.py"]
    return [found for path in paths for found in imports_of(path)]


def sources() -> list[Path]:
    return [path for part in PARTS for path in files_of(part)] + root_modules()


def described(imports: list[Import]) -> str:
    return "\n".join(str(found) for found in imports)


def test_every_source_has_a_place_in_the_table() -> None:
    assert {home_of(path) for path in sources()} == set(MAY_IMPORT)


@pytest.mark.parametrize("home", MAY_IMPORT)
def test_only_arrows_of_the_table_are_imported(home: str) -> None:
    allowed = MAY_IMPORT[home] | EVERYONE | {home, "__init__"}
    wrong = [found for found in imports_from(home) if found.level == 0 and not targets_of(found) <= allowed]
    assert not wrong, described(wrong)


def test_errors_imports_nothing_of_ours() -> None:
    assert not [found for found in imports_from("errors") if targets_of(found)]


def test_only_embedded_mode_and_tools_have_both_sides() -> None:
    both = {
        home
        for home in MAY_IMPORT
        if {"worker", "pserver"} <= {target for found in imports_from(home) for target in targets_of(found)}
    }
    assert both == {"embedded", "embedded_client", "tools"}


def test_paddle_is_imported_by_plugin_transpiler_and_models_only() -> None:
    importers = {
        home_of(path) for path in sources() for found in imports_of(path) if found.module.split(".")[0] == "paddle"
    }
    assert importers <= IMPORTS_PADDLE


def test_text_of_data_sets_is_read_without_paddle() -> None:
    with_paddle = {
        found.path.stem
        for found in imports_from("plugin")
        if found.path.parent.name == "datasets" and found.level == 0 and found.module.split(".")[0] == "paddle"
    }
    assert with_paddle == {"memory_calls", "runs"}


def test_models_are_described_without_paddle() -> None:
    with_paddle = {found.path.stem for found in imports_from("serving") if found.module.split(".")[0] == "paddle"}
    assert with_paddle == {"paddle_network", "paddle_export"}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_names_its_own_modules_relatively(part: str) -> None:
    absolute = [found for found in imports_from(part) if found.level == 0 and part in targets_of(found)]
    assert not absolute, described(absolute)


@pytest.mark.parametrize("part", PARTS)
def test_a_relative_import_stays_in_its_part(part: str) -> None:
    root = files_of(part)[0].parent
    outside = [found for found in imports_from(part) if found.level > len(found.path.relative_to(root).parts)]
    assert not outside, described(outside)


def test_modules_beside_the_parts_import_absolutely() -> None:
    relative = [found for path in root_modules() for found in imports_of(path) if found.level > 0]
    assert not relative, described(relative)


def test_no_folder_is_imported_by_its_bare_name() -> None:
    # `import pserver` from a checkout would load a second copy of every class.
    everywhere = [*sources(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py"), ROOT / "setup.py"]
    bare = [
        found
        for path in everywhere
        for found in imports_of(path)
        if found.level == 0 and found.module.split(".")[0] in {*PARTS, "tests"}
    ]
    assert not bare, described(bare)


@pytest.mark.parametrize("banned", ["pickle", "marshal", "shelve", "dill"])
def test_nothing_reads_or_writes_pickles(banned: str) -> None:
    assert banned not in {found.module.split(".")[0] for path in sources() for found in imports_of(path)}


@pytest.mark.parametrize("banned", ["eval", "exec", "os.system", "os.popen", "allow_pickle=True", "shell=True"])
def test_nothing_runs_text_as_code_or_asks_for_pickles(banned: str) -> None:
    """Calls by name, and keywords of calls; a keyword whose value is not a constant counts as `True`."""
    assert not [f"{path}:{line}" for path in sources() for name, line in calls_of(path) if name == banned]


def calls_of(path: Path) -> Iterator[tuple[str, int]]:
    """Yields what is called in a file, and `keyword=True` for each keyword that is not a false constant, with lines."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node.lineno
            for keyword in node.keywords:
                if not (isinstance(keyword.value, ast.Constant) and not keyword.value.value):
                    yield f"{keyword.arg}=True", node.lineno


# Tests


def test_no_name_of_a_test_is_longer_than_60_characters() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    names = [name for source in sources for name in re.findall(r"^\s*(?:async )?def (test_\w+)", source, re.MULTILINE)]
    assert len(names) > 1000
    assert [name for name in names if len(name) > 60] == []
