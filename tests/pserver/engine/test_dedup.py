from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from fleet_sparse.core.watermark import Watermark
from fleet_sparse.pserver.engine.dedup import DedupLedger, Verdict

A, B = b"a" * 16, b"b" * 16


def ledger_at(watermark: int, epoch: int = 1) -> DedupLedger:
    return DedupLedger([Watermark(A, epoch, watermark)])


def test_first_push_of_a_client_has_number_one() -> None:
    assert DedupLedger().judge_push(A, 1, 1) is Verdict.APPLY


def test_next_push_is_applied() -> None:
    assert ledger_at(5).judge_push(A, 1, 6) is Verdict.APPLY


def test_applied_push_is_a_duplicate() -> None:
    assert ledger_at(5).judge_push(A, 1, 5) is Verdict.DUPLICATE
    assert ledger_at(5).judge_push(A, 1, 1) is Verdict.DUPLICATE


def test_push_after_a_missing_one_is_a_gap() -> None:
    assert ledger_at(5).judge_push(A, 1, 7) is Verdict.GAP


def test_push_of_an_older_epoch_is_stale() -> None:
    assert ledger_at(5, epoch=3).judge_push(A, 2, 6) is Verdict.STALE_EPOCH


def test_newer_epoch_counts_from_one_again() -> None:
    ledger = ledger_at(5)
    assert ledger.judge_push(A, 2, 6) is Verdict.GAP
    assert ledger.judge_push(A, 2, 1) is Verdict.APPLY
    ledger.record(A, 2, 1)
    assert (ledger.epoch(A), ledger.watermark(A, 2)) == (2, 1)


def test_judging_a_newer_epoch_does_not_begin_it() -> None:
    ledger = ledger_at(5)
    ledger.judge_push(A, 2, 1)
    assert ledger.judge_push(A, 1, 6) is Verdict.APPLY


def test_pull_waits_for_its_floor() -> None:
    assert ledger_at(5).judge_pull(A, 1, 5) is Verdict.APPLY
    assert ledger_at(5).judge_pull(A, 1, 6) is Verdict.GAP


def test_pull_of_an_older_epoch_is_stale() -> None:
    assert ledger_at(5, epoch=3).judge_pull(A, 2, 0) is Verdict.STALE_EPOCH


def test_clients_do_not_share_numbers() -> None:
    ledger = ledger_at(5)
    assert ledger.judge_push(B, 1, 1) is Verdict.APPLY
    ledger.record(B, 1, 1)
    assert (ledger.watermark(A, 1), ledger.watermark(B, 1)) == (5, 1)


def test_ledger_of_its_marks_is_the_same_ledger() -> None:
    marks = [Watermark(A, 3, 5), Watermark(B, 1, 9)]
    assert DedupLedger(DedupLedger(marks).marks()).marks() == marks


# Pushes that are applied later


def test_held_push_is_a_duplicate_and_not_applied() -> None:
    ledger = ledger_at(5)
    ledger.hold(A, 1, 6)
    assert ledger.judge_push(A, 1, 6) is Verdict.DUPLICATE
    assert (ledger.newest(A, 1), ledger.watermark(A, 1)) == (6, 5)


def test_push_after_a_held_one_is_the_next() -> None:
    ledger = ledger_at(5)
    ledger.hold(A, 1, 6)
    assert ledger.judge_push(A, 1, 7) is Verdict.APPLY
    assert ledger.judge_push(A, 1, 8) is Verdict.GAP


def test_pull_after_a_held_push_is_no_gap() -> None:
    ledger = ledger_at(5)
    ledger.hold(A, 1, 6)
    assert ledger.judge_pull(A, 1, 6) is Verdict.APPLY
    assert ledger.judge_pull(A, 1, 7) is Verdict.GAP


def test_push_that_was_held_is_applied_when_it_is_recorded() -> None:
    ledger = ledger_at(5)
    ledger.hold(A, 1, 6)
    ledger.record(A, 1, 6)
    assert (ledger.newest(A, 1), ledger.watermark(A, 1)) == (6, 6)


def test_newer_epoch_forgets_what_an_older_one_held() -> None:
    ledger = DedupLedger()
    ledger.hold(A, 1, 1)
    ledger.hold(A, 2, 1)
    assert ledger.judge_push(A, 1, 2) is Verdict.STALE_EPOCH
    assert (ledger.newest(A, 2), ledger.newest(A, 1)) == (1, 0)


def test_held_push_begins_its_epoch() -> None:
    ledger = ledger_at(5)
    ledger.hold(A, 2, 1)
    assert ledger.epoch(A) == 2
    assert ledger.judge_pull(A, 1, 0) is Verdict.STALE_EPOCH


def test_snapshot_has_no_held_pushes() -> None:
    ledger = ledger_at(5)
    ledger.hold(A, 1, 6)
    ledger.hold(B, 1, 1)
    assert ledger.marks() == [Watermark(A, 1, 5)]


@dataclass
class Model:
    """All pushes ever applied, in order."""

    applied: list[tuple[bytes, int, int]] = field(default_factory=list)

    def of(self, client: bytes, epoch: int) -> list[int]:
        return [seq for who, when, seq in self.applied if (who, when) == (client, epoch)]


@given(st.lists(st.tuples(st.sampled_from([A, B]), st.integers(1, 3), st.integers(1, 6)), max_size=60))
def test_whatever_arrives_each_push_is_applied_once_and_in_order(arrivals: list[tuple[bytes, int, int]]) -> None:
    ledger, model = DedupLedger(), Model()
    for client, epoch, seq in arrivals:
        newest = max((when for who, when, _ in model.applied if who == client), default=0)
        done = model.of(client, epoch)
        verdict = ledger.judge_push(client, epoch, seq)
        if epoch < newest:
            expected = Verdict.STALE_EPOCH
        elif seq in done:
            expected = Verdict.DUPLICATE
        else:
            expected = Verdict.APPLY if seq == len(done) + 1 else Verdict.GAP
        assert verdict is expected
        if verdict is Verdict.APPLY:
            ledger.record(client, epoch, seq)
            model.applied.append((client, epoch, seq))
    for client in (A, B):
        for epoch in (1, 2, 3):
            done = model.of(client, epoch)
            assert done == list(range(1, len(done) + 1))


@given(st.lists(st.tuples(st.integers(1, 8), st.booleans()), max_size=60))
def test_pushes_are_taken_once_and_in_order_whenever_they_are_applied(arrivals: list[tuple[int, bool]]) -> None:
    """A push arrives, or all that are held are applied."""
    ledger, taken, applied = DedupLedger(), 0, 0
    for seq, arrives in arrivals:
        if arrives and ledger.judge_push(A, 1, seq) is Verdict.APPLY:
            assert seq == taken + 1
            taken = seq
            ledger.hold(A, 1, seq)
        elif not arrives and taken > applied:
            applied = taken
            ledger.record(A, 1, applied)
        assert (ledger.newest(A, 1), ledger.watermark(A, 1)) == (taken, applied)
        assert ledger.judge_pull(A, 1, taken) is Verdict.APPLY
        assert ledger.judge_pull(A, 1, taken + 1) is Verdict.GAP
