"""Maps the top-level parts into the one import name `fleet_sparse`; the metadata is in pyproject.toml."""

from setuptools import find_packages, setup

NAME = "fleet_sparse"
PARTS = ("transpiler", "pserver", "models")  # beside this file here, inside fleet_sparse once installed

OURS = ("core", "wire", "snapshot", "serving", "worker", "plugin", "tools", "cli")

packages = find_packages(include=[NAME, *(f"{NAME}.{part}*" for part in OURS)])
for part in PARTS:
    packages += [f"{NAME}.{part}", *(f"{NAME}.{part}.{sub}" for sub in find_packages(part))]

setup(
    packages=packages,
    package_dir={NAME: NAME, **{f"{NAME}.{part}": part for part in PARTS}},
)
