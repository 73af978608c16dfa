from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from fleet_sparse.errors import SettingError
from fleet_sparse.settings import PREFIX, Behaviour, Performance, Settings
from fleet_sparse.wire.frame_format import BLOCK_BYTES, HEADER_BYTES, MAX_DIM
from support.sources import ROOT

TYPES = get_type_hints(Settings)
NAMES = [field.name for field in fields(Settings)]
DEFAULTS = Settings()
GIVEN: dict[type, tuple[str, object]] = {
    float: ("12.5", 12.5),
    int: ("7000000", 7_000_000),
    str: ("somewhere", "somewhere"),
    Path: ("somewhere/else", Path("somewhere/else")),
}
CHOICES = {name: get_args(kind) for name, kind in TYPES.items() if get_origin(kind) is Literal}


def variable(name: str) -> str:
    return PREFIX + name.upper()


def text_and_value(name: str) -> tuple[str, object]:
    """A value other than the default, as text and as read."""
    if name in CHOICES:
        return CHOICES[name][-1], CHOICES[name][-1]
    if name == "worker_lost_s":  # less than 30 would change the time between heartbeats, too
        return "45.5", 45.5
    if name == "row_shards":  # a number of pservers
        return "7000", 7000
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


def test_misspelt_variable_is_refused_with_the_closest_one() -> None:
    with pytest.raises(SettingError) as refused:
        Settings.from_environment({"FLEET_SPARSE_DEADLINES": "1"})
    assert re.findall(r"FLEET_SPARSE_\w+", str(refused.value)) == ["FLEET_SPARSE_DEADLINES", "FLEET_SPARSE_DEADLINE_S"]


def test_environment_of_the_process_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_SPARSE_SEED", "11")
    assert Settings.from_environment().seed == 11


@pytest.mark.parametrize(("texts", "is_on"), [(("1", "true", "True"), True), (("0", "false", "False"), False)])
def test_switch_is_read(texts: tuple[str, ...], is_on: bool) -> None:
    for text in texts:
        variables = {"FLEET_SPARSE_INSECURE": text, "FLEET_SPARSE_HUGE_PAGES": text}
        settings = Settings.from_environment(variables)
        assert (settings.insecure, settings.huge_pages) == (is_on, is_on)


NUMBERS = [name for name in NAMES if TYPES[name] in (int, float)]
REFUSED = [
    *((name, text) for name in NAMES if TYPES[name] is bool for text in ("", "yes", "2")),
    *((name, text) for name in NUMBERS for text in ("", "ten", "1,5", "1 s", "-1")),
    *((name, "1.5") for name in NAMES if TYPES[name] is int),
    *((name, text) for name in NAMES if name.endswith("_s") for text in ("0", "0.0001", "1e7", "inf", "nan")),
    *((name, "tcp") for name in CHOICES),
    ("max_inflight_pushes", "0"),
    ("max_inflight_bytes", "0"),
    ("max_staged_bytes", "1e16"),
    ("max_frame_bytes", "4096"),
    ("seed", f"{1 << 64}"),
]


@pytest.mark.parametrize(("name", "text"), REFUSED)
def test_value_out_of_range_is_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(SettingError, match=rf"^{variable(name)}: is {text!r}, "):
        Settings.from_environment({variable(name): text})


def test_a_save_may_be_allowed_no_pre_images() -> None:
    assert Settings.from_environment({"FLEET_SPARSE_MAX_PRE_IMAGE_BYTES": "0"}).max_pre_image_bytes == 0


@pytest.mark.parametrize("name", NUMBERS)
def test_default_of_a_number_is_in_its_range(name: str) -> None:
    _, allowed = get_args(get_type_hints(Settings, include_extras=True)[name])
    assert allowed.least <= getattr(DEFAULTS, name) <= allowed.most


def test_a_row_of_any_dim_fits_into_the_smallest_frame() -> None:
    _, allowed = get_args(get_type_hints(Settings, include_extras=True)["max_frame_bytes"])
    assert allowed.least >= HEADER_BYTES + BLOCK_BYTES + 8 + 4 * MAX_DIM


def test_worker_lost_between_two_heartbeats_is_refused() -> None:
    with pytest.raises(SettingError, match=r"^FLEET_SPARSE_WORKER_LOST_S: is 1, .*FLEET_SPARSE_HEARTBEAT_S.* 0.6$"):
        Settings.from_environment({"FLEET_SPARSE_WORKER_LOST_S": "1", "FLEET_SPARSE_HEARTBEAT_S": "0.6"})


@pytest.mark.parametrize(("worker_lost_s", "heartbeat_s"), [("1", 0.5), ("20", 10.0), ("60", 15.0)])
def test_heartbeats_are_at_most_half_of_worker_lost(worker_lost_s: str, heartbeat_s: float) -> None:
    assert Settings.from_environment({"FLEET_SPARSE_WORKER_LOST_S": worker_lost_s}).heartbeat_s == heartbeat_s


@pytest.mark.parametrize("group", [Behaviour, Performance])
def test_the_page_lists_every_variable_with_its_default(group: type[Behaviour | Performance]) -> None:
    page = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
    section = page.split(f"### {group.__name__}\n", 1)[1].split("\n#", 1)[0]
    listed = re.findall(r"^\| `(FLEET_SPARSE_\w+)` \| `([^`]*)` \|", section, re.M)
    expected = [(variable(field.name), shown(getattr(DEFAULTS, field.name))) for field in fields(group)]
    assert listed == expected


def shown(value: Any) -> str:
    """A default as the page shows it: as in the environment, `none` if empty."""
    return (
        str(int(value))
        if isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value) or "none"
    )
