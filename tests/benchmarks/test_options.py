"""Options without sense, which benchmarks refuse before they begin."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks.__main__ import WAYS


def run(name: str, *options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *options])
    import_module(f"benchmarks.{name}").main()


def parser_of(name: str, monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    """That a benchmark makes."""
    made: list[argparse.ArgumentParser] = []

    def begin(parser: argparse.ArgumentParser, *arguments: object) -> None:
        made.append(parser)
        raise InterruptedError

    with monkeypatch.context() as patched, pytest.raises(InterruptedError):
        patched.setattr(argparse.ArgumentParser, "parse_known_args", begin)
        run(name, monkeypatch=monkeypatch)
    return made[0]


@pytest.mark.parametrize("name", WAYS)
def test_no_number_of_an_option_may_be_negative_or_a_word(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = parser_of(name, monkeypatch)
    numbers = [each for each in parser._actions if each.help != argparse.SUPPRESS and each.type not in (None, Path)]
    assert numbers
    for option in numbers:
        for text in ("-1", "few", "nan"):
            with pytest.raises(SystemExit, match=r"^2$"):
                parser.parse_args([option.option_strings[0], text])
            assert f"{text!r} should be a" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("client --batch 0", "argument --batch: '0' should be a whole number, at least 1"),
        ("client --shards 1 0", "argument --shards: '0' should be a whole number, 1 to 16384"),
        ("client --dim 65536", "argument --dim: '65536' should be a whole number, 1 to 65535"),
        ("client --rounds 0", "argument --rounds: '0' should be a whole number, at least 1"),
        ("client --rule foo", "argument --rule: invalid choice: 'foo' (choose from 'sgd', 'adagrad',"),
        ("client --channels foo", "argument --channels: invalid choice: 'foo' (choose from 'zmq', 'stream'"),
        ("client --rows 10 --batch 11", "argument --batch: 11 should be at most --rows, which is 10"),
        ("local --rows 10 --batch 11", "argument --batch: 11 should be at most --rows, which is 10"),
        ("kernels --rows 20 10 --batch 11", "argument --batch: 11 should be at most --rows, which is 10"),
        ("kernels --gigabytes 0", "argument --gigabytes: '0' should be a number above 0, and finite"),
        ("snapshot --rule read_only", "argument --rule: invalid choice: 'read_only'"),
        ("snapshot --rows 99", "argument --rows: '99' should be a whole number, at least 100"),
        ("step --channel foo", "argument --channel: invalid choice: 'foo' (choose from 'auto', 'zmq', 'stream')"),
        ("step --rounds 1", "argument --rounds: '1' should be a whole number, at least 2"),
        ("dense --kilobytes inf", "argument --kilobytes: 'inf' should be a number above 0, and finite"),
        ("scale --jobs async,9x9", "argument --jobs: invalid choice: 'async,9x9'"),
        ("convergence --data movies", "--data movies: no such data; there are flights"),
        ("convergence --epoch-s 3", "unrecognized arguments: --epoch-s 3"),
    ],
)
def test_options_without_sense_are_named(
    command: str, error: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        run(*command.split(), monkeypatch=monkeypatch)
    assert f"error: {error}" in capsys.readouterr().err


def test_a_count_may_be_written_with_a_suffix(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parser_of("growth", monkeypatch).parse_args(["--rows", "20M"]).rows == 20_000_000
