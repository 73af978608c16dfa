from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from fleet_sparse.models import lines


@pytest.fixture
def hundred(write: Callable[..., Path]) -> Path:
    return write(*(str(number) for number in range(1, 101)))


def numbers(batches: list[lines.LineBatch]) -> list[int]:
    return [int(text) for batch in batches for text in batch.texts]


def test_the_last_batch_has_what_is_left(hundred: Path) -> None:
    assert [len(batch.texts) for batch in lines.batches(hundred, 30)] == [30, 30, 30, 10]


def test_a_batch_knows_the_number_of_its_first_line(hundred: Path) -> None:
    assert all(batch.first == int(batch.texts[0]) for batch in lines.batches(hundred, 30))


def test_gzip_reads_as_plain_text_whatever_the_name(hundred: Path) -> None:
    packed = hundred.with_name("packed.txt")
    packed.write_bytes(gzip.compress(hundred.read_bytes()))
    assert numbers(list(lines.batches(packed, 7))) == list(range(1, 101))


def test_line_ends_of_windows_are_no_part_of_a_line(write: Callable[..., Path]) -> None:
    assert numbers(list(lines.batches(write("1\r", "2\r"), 5))) == [1, 2]


@pytest.mark.parametrize("is_held_out", [False, True])
def test_workers_and_test_share_a_file_without_overlap(hundred: Path, is_held_out: bool) -> None:
    shares = [
        numbers(list(lines.train_batches(hundred, 4, worker_index=i, num_workers=3, is_held_out=is_held_out)))
        for i in range(3)
    ]
    held_out = numbers(list(lines.test_batches(hundred, 4, is_held_out=True))) if is_held_out else []
    assert sorted(sum(shares, held_out)) == list(range(1, 101))


def test_every_tenth_batch_is_held_out(hundred: Path) -> None:
    assert [batch.first for batch in lines.test_batches(hundred, 4, is_held_out=True)] == [37, 77]


def test_a_test_file_of_its_own_is_read_whole(hundred: Path) -> None:
    assert numbers(list(lines.test_batches(hundred, 4, is_held_out=False))) == list(range(1, 101))


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(b"1\n\xff\xfe\n")
    with pytest.raises(ValueError, match="UTF-8"):
        list(lines.batches(path, 1))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent\.txt"):
        list(lines.batches(tmp_path / "absent.txt", 1))


def test_a_directory_is_read_file_by_file(tmp_path: Path) -> None:
    for name, texts in (("part-1", "3\n4\n5\n"), ("part-0", "1\n2\n")):
        (tmp_path / name).write_text(texts)
    (tmp_path / "below").mkdir()
    batches = list(lines.batches(tmp_path, 2))
    assert [(batch.path.name, batch.first, numbers([batch])) for batch in batches] == [
        ("part-0", 1, [1, 2]),
        ("part-1", 1, [3, 4]),
        ("part-1", 3, [5]),
    ]


def test_a_directory_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no file"):
        list(lines.batches(tmp_path, 2))
