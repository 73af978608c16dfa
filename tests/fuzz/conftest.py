from __future__ import annotations

import pytest

from support.fuzzing import Cases


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test with `cases` has a few in an ordinary run, and rounds of many with `-m fuzz`."""
    if "cases" not in metafunc.fixturenames:
        return
    (marker,) = metafunc.definition.iter_markers("cases")
    few, many = marker.args
    options = metafunc.config.option
    name, seed = metafunc.definition.name, options.fuzz_seed
    parameters = [pytest.param(Cases(few, f"{name} few"), id="few")]
    for number in range(options.fuzz_rounds):
        cases = Cases(many, f"{name} {seed} {number}")
        parameters.append(pytest.param(cases, id=f"round {seed}.{number}", marks=pytest.mark.fuzz))
    metafunc.parametrize("cases", parameters)
