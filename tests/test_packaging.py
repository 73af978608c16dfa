"""pyproject.toml against what the code needs."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import packages_distributions

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import fleet_sparse
from support.sources import PARTS, ROOT, files_of, imports_of, root_modules

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REQUIRED = {requirement.name: requirement for requirement in map(Requirement, PROJECT["dependencies"])}
EXTRAS = {
    name: {requirement.name: requirement for requirement in map(Requirement, requirements)}
    for name, requirements in PROJECT["optional-dependencies"].items()
}
"""What an extra brings; Paddle is the extra `cpu`, the data of the demo the extra `demo`."""
MAY_NEED = {
    "transpiler": ("cpu",),
    "plugin": ("cpu",),
    "models": ("cpu", "demo"),
    "pserver": ("etcd", "zookeeper"),
    "snapshot": ("remote",),
    "serving": ("cpu", "onnx"),
    "tools": ("cpu", "keys", "parquet", "plot"),
}


def third_party(part: str) -> set[str]:
    """The distributions that a part imports, by name."""
    paths = files_of(part) if part in PARTS else root_modules()
    modules = {found.module for path in paths for found in imports_of(path) if found.level == 0}
    tops = {module.split(".")[0] for module in modules} - sys.stdlib_module_names - {"fleet_sparse"}
    distributions = packages_distributions()
    # `google` is a namespace of several; the one that we import is protobuf's.
    distributions["google"] = ["protobuf"]
    distributions["llvmlite"] = ["numba"]  # which names the one version that fits it
    return {name.lower().replace("_", "-") for top in tops for name in distributions.get(top, [top])}


@pytest.mark.parametrize("part", [*PARTS, "the modules beside the parts"])
def test_what_a_part_imports_is_declared(part: str) -> None:
    declared = set(REQUIRED).union(*(EXTRAS[extra] for extra in MAY_NEED.get(part, ())))
    assert third_party(part) <= declared


def test_every_requirement_is_imported_somewhere() -> None:
    assert set(REQUIRED) <= set().union(*(third_party(part) for part in [*PARTS, "the modules beside the parts"]))


@pytest.mark.parametrize(
    "requirement",
    [
        *REQUIRED.values(),
        *EXTRAS["cpu"].values(),
        *EXTRAS["demo"].values(),
        *EXTRAS["remote"].values(),
        *EXTRAS["parquet"].values(),
        *EXTRAS["plot"].values(),
        *EXTRAS["keys"].values(),
        *EXTRAS["onnx"].values(),
        *EXTRAS["serve"].values(),
        *EXTRAS["etcd"].values(),
        *EXTRAS["zookeeper"].values(),
    ],
    ids=str,
)
def test_a_range_has_both_ends(requirement: Requirement) -> None:
    assert {specifier.operator for specifier in requirement.specifier} == {">=", "<"}


def test_paddle_is_never_a_hard_requirement() -> None:
    assert not [name for name in REQUIRED if name.startswith("paddle")]


def test_every_protobuf_allowed_runs_the_generated_code() -> None:
    generated = (ROOT / "fleet_sparse" / "wire" / "control_pb2.py").read_text(encoding="utf-8")
    found = re.search(r"# Protobuf Python Version: (\S+)", generated)
    assert found is not None
    version = Version(found[1])
    bounds = {part.operator: Version(part.version) for part in REQUIRED["protobuf"].specifier}
    assert bounds[">="] >= version, "a runtime older than the code refuses it"
    assert bounds["<"] <= Version(f"{version.major + 2}"), (
        "a runtime takes code of its own major version and the one before"
    )


def test_the_version_is_said_once_more_and_the_same() -> None:
    assert fleet_sparse.__version__ == PROJECT["version"]


def test_the_changelog_begins_with_this_version() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert next(heading for heading in headings if heading != "Unreleased") == PROJECT["version"]
