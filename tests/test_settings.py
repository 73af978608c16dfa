from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from fleet_sparse.errors import SettingError
from fleet_sparse.settings import PREFIX, Settings
from support.sources import ROOT

TYPES = get_type_hints(Settings)
NAMES = [field.name for field in fields(Settings)]
DEFAULTS = Settings()
GIVEN: dict[type, tuple[str, object]] = {
    float: ("2.5", 2.5),
    int: ("7", 7),
    str: ("WARNING", "WARNING"),
    Path: ("somewhere/else", Path("somewhere/else")),
}
CHOICES = {"channel": "zmq", "rows_dtype": "bfloat16"}


def variable(name: str) -> str:
    return PREFIX + name.upper()


def text_and_value(name: str) -> tuple[str, object]:
    """A value other than the default, as text and as read."""
    if name in CHOICES:
        return CHOICES[name], CHOICES[name]
    if TYPES[name] is bool:
        return ("0", False) if getattr(DEFAULTS, name) else ("1", True)
    return GIVEN[TYPES[name]]


def test_without_variables_every_setting_has_its_default() -> None:
    assert Settings.from_environment({"PATH": "/bin", "FLEETSPARSE_SEED": "1"}) == DEFAULTS


@pytest.mark.parametrize("name", NAMES)
def test_variable_sets_its_field_and_no_other(name: str) -> None:
    text, value = text_and_value(name)
    settings = Settings.from_environment({variable(name): text})
    assert getattr(settings, name) == value
    assert type(getattr(settings, name)) is type(getattr(DEFAULTS, name))
    assert {other for other in NAMES if getattr(settings, other) != getattr(DEFAULTS, other)} == {name}


def test_environment_of_the_process_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_SPARSE_SEED", "11")
    assert Settings.from_environment().seed == 11


@pytest.mark.parametrize("text", ["1", "true", "True"])
def test_switch_is_on(text: str) -> None:
    assert Settings.from_environment({"FLEET_SPARSE_INSECURE": text}).insecure


@pytest.mark.parametrize("text", ["0", "false", "False"])
def test_switch_is_off(text: str) -> None:
    assert not Settings.from_environment({"FLEET_SPARSE_HUGE_PAGES": text}).huge_pages


@pytest.mark.parametrize("name", [name for name in NAMES if TYPES[name] is bool])
@pytest.mark.parametrize("text", ["", "yes", "2"])
def test_switch_that_is_neither_on_nor_off_is_refused(name: str, text: str) -> None:
    with pytest.raises(SettingError, match=rf"^{variable(name)}: {text!r} is not a switch; write 1 or 0$"):
        Settings.from_environment({variable(name): text})


@pytest.mark.parametrize("name", [name for name in NAMES if TYPES[name] in (int, float)])
@pytest.mark.parametrize("text", ["", "ten", "1,5", "1 s"])
def test_text_that_is_no_number_is_refused(name: str, text: str) -> None:
    with pytest.raises(SettingError, match=rf"^{variable(name)}: {text!r} is not a number$"):
        Settings.from_environment({variable(name): text})


@pytest.mark.parametrize("name", [name for name in NAMES if TYPES[name] is int])
def test_fraction_is_refused_where_a_count_is_asked_for(name: str) -> None:
    with pytest.raises(SettingError, match="is not a number"):
        Settings.from_environment({variable(name): "1.5"})


@pytest.mark.parametrize("name", [name for name in NAMES if TYPES[name] in (int, float)])
def test_negative_number_is_refused(name: str) -> None:
    with pytest.raises(SettingError, match=rf"^{variable(name)}: '-1' is negative$"):
        Settings.from_environment({variable(name): "-1"})


@pytest.mark.parametrize("name", [name for name in NAMES if TYPES[name] is float])
def test_nan_is_refused(name: str) -> None:
    with pytest.raises(SettingError, match=variable(name)):
        Settings.from_environment({variable(name): "nan"})


def test_worker_that_would_be_lost_between_two_heartbeats_is_refused() -> None:
    with pytest.raises(SettingError, match=r"^FLEET_SPARSE_WORKER_LOST_S: is 1, should be at least twice"):
        Settings.from_environment({"FLEET_SPARSE_WORKER_LOST_S": "1"})


def test_channel_that_there_is_not_is_refused_with_those_there_are() -> None:
    with pytest.raises(SettingError, match=r"^FLEET_SPARSE_CHANNEL: 'tcp' is none of auto, zmq, stream$"):
        Settings.from_environment({"FLEET_SPARSE_CHANNEL": "tcp"})


def test_dtype_that_there_is_not_is_refused_with_those_there_are() -> None:
    with pytest.raises(SettingError, match=r"^FLEET_SPARSE_ROWS_DTYPE: 'half' is none of float32, float16, bfloat16$"):
        Settings.from_environment({"FLEET_SPARSE_ROWS_DTYPE": "half"})


def test_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SettingError, match=r"^FLEET_SPARSE_DEADLINE: no such setting; .*FLEET_SPARSE_SEED"):
        Settings.from_environment({"FLEET_SPARSE_DEADLINE": "3"})


def test_the_page_lists_every_variable_with_its_default() -> None:
    page = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `(FLEET_SPARSE_\w+)` \| `([^`]*)` \|", page, re.M))
    assert listed == {variable(name): shown(getattr(DEFAULTS, name)) for name in NAMES}


def shown(value: Any) -> str:
    """A default as one would write it into the environment; of nothing, the word."""
    return (
        str(int(value))
        if isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value) or "none"
    )
