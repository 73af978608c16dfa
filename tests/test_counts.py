from __future__ import annotations

import argparse

import pytest

from fleet_sparse.counts import LARGEST, count_from, count_of

BILLION = 1_000_000_000


@pytest.mark.parametrize(
    "text", ["1000000000", "1_000_000_000", "1,000,000,000", "1e9", "1E+9", "1G", "0.001T", "1000M"]
)
def test_a_billion_can_be_written_in_many_ways(text: str) -> None:
    assert count_of(text) == BILLION


@pytest.mark.parametrize(("text", "value"), [("0", 0), ("007", 7), ("1.5k", 1500), ("2K", 2000), (" 3M ", 3_000_000)])
def test_a_suffix_is_decimal_and_may_follow_a_fraction(text: str, value: int) -> None:
    assert count_of(text) == value


def test_a_count_is_exact() -> None:
    assert count_of("9.007199254740993e15") == 9_007_199_254_740_993
    assert count_of(str(LARGEST)) == LARGEST


@pytest.mark.parametrize(
    "text",
    [
        *("", "many", "-1", "+1", "1.5", "0.0005k", "1e-3", "nan", "inf", "1e", "1e999", "9e18T"),
        *("1,5", "1,0000", "1000,000", ",100", "1__0", "_1", "1_", "1m", "1Mi", "10 M", "0x10", "\u0661", "9" * 5000),
        str(LARGEST + 1),
    ],
)
def test_a_text_that_is_not_a_count_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"1_000_000, .* 1e6 or 1M"):
        count_of(text)


def parsed(option: str, text: str) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument(option, type={"--any": count_from(1), "--dim": count_from(1, 64)}[option])
    value: int = next(iter(vars(parser.parse_args([option, text])).values()))
    return value


@pytest.mark.parametrize(
    ("option", "text", "value"), [("--any", "1G", BILLION), ("--any", "1", 1), ("--dim", "64", 64)]
)
def test_an_option_takes_a_count_in_its_range(option: str, text: str, value: int) -> None:
    assert parsed(option, text) == value


@pytest.mark.parametrize(
    ("option", "text", "message"),
    [
        ("--any", "0", "'0' should be a whole number, at least 1"),
        ("--dim", "65", "'65' should be a whole number, 1 to 64"),
        ("--any", "-1", "'-1' should be a whole number, as 1000000"),
        ("--any", "few", "'few' should be a whole number, as 1000000"),
    ],
)
def test_an_option_refuses_any_other_count(
    option: str, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        parsed(option, text)
    assert f"error: argument {option}: {message}" in capsys.readouterr().err
