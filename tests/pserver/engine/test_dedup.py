from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fleet_sparse.core.watermark import Watermark
from fleet_sparse.pserver.engine.dedup import DedupLedger, Verdict

A, B = b"a" * 16, b"b" * 16


def ledger_at(watermark: int) -> DedupLedger:
    return DedupLedger([Watermark(A, 1, watermark)])


def test_first_push_of_a_client_has_number_one() -> None:
    assert DedupLedger().judge_push(A, 1) is Verdict.NEW


def test_next_push_is_applied() -> None:
    assert ledger_at(5).judge_push(A, 6) is Verdict.NEW


def test_applied_push_is_answered_only() -> None:
    assert ledger_at(5).judge_push(A, 5) is Verdict.ANSWER
    assert ledger_at(5).judge_push(A, 1) is Verdict.ANSWER


def test_push_after_a_missing_one_is_a_gap() -> None:
    assert ledger_at(5).judge_push(A, 7) is Verdict.GAP


def test_pull_waits_for_its_floor() -> None:
    assert ledger_at(5).judge_pull(A, 5) is Verdict.ANSWER
    assert ledger_at(5).judge_pull(A, 6) is Verdict.GAP


def test_clients_do_not_share_numbers() -> None:
    ledger = ledger_at(5)
    assert ledger.judge_push(B, 1) is Verdict.NEW
    ledger.record([Watermark(B, 1, 1)])
    assert (ledger.applied(A), ledger.applied(B)) == (5, 1)


def test_ledger_of_its_watermarks_is_the_same_ledger() -> None:
    watermarks = [Watermark(A, 3, 5), Watermark(B, 1, 9)]
    assert DedupLedger(DedupLedger(watermarks).watermarks()).watermarks() == watermarks


# Pushes that are applied later


def test_staged_push_is_answered_only_and_not_applied() -> None:
    ledger = ledger_at(5)
    ledger.stage(A, 6)
    assert ledger.judge_push(A, 6) is Verdict.ANSWER
    assert (ledger.newest(A), ledger.applied(A)) == (6, 5)


def test_push_after_a_staged_one_is_the_next() -> None:
    ledger = ledger_at(5)
    ledger.stage(A, 6)
    assert ledger.judge_push(A, 7) is Verdict.NEW
    assert ledger.judge_push(A, 8) is Verdict.GAP


def test_pull_after_a_staged_push_is_no_gap() -> None:
    ledger = ledger_at(5)
    ledger.stage(A, 6)
    assert ledger.judge_pull(A, 6) is Verdict.ANSWER
    assert ledger.judge_pull(A, 7) is Verdict.GAP


def test_push_that_was_staged_is_applied_when_it_is_recorded() -> None:
    ledger = ledger_at(5)
    ledger.stage(A, 6)
    ledger.record([Watermark(A, 1, 6)])
    assert (ledger.newest(A), ledger.applied(A)) == (6, 6)


def test_snapshot_has_no_staged_pushes() -> None:
    ledger = ledger_at(5)
    ledger.stage(A, 6)
    ledger.stage(B, 1)
    assert ledger.watermarks() == [Watermark(A, 1, 5)]


@given(st.lists(st.tuples(st.sampled_from([A, B]), st.integers(1, 6)), max_size=60))
def test_each_push_is_applied_once_and_in_order(arrivals: list[tuple[bytes, int]]) -> None:
    ledger, applied = DedupLedger(), {A: 0, B: 0}
    for client, seq in arrivals:
        verdict = ledger.judge_push(client, seq)
        if seq <= applied[client]:
            assert verdict is Verdict.ANSWER
        else:
            assert verdict is (Verdict.NEW if seq == applied[client] + 1 else Verdict.GAP)
        if verdict is Verdict.NEW:
            ledger.record([Watermark(client, 1, seq)])
            applied[client] = seq


@given(st.lists(st.tuples(st.integers(1, 8), st.booleans()), max_size=60))
def test_pushes_are_new_once_and_in_order_if_staged(arrivals: list[tuple[int, bool]]) -> None:
    """A push arrives, or all staged ones are applied."""
    ledger, taken, applied = DedupLedger(), 0, 0
    for seq, arrives in arrivals:
        if arrives and ledger.judge_push(A, seq) is Verdict.NEW:
            assert seq == taken + 1
            taken = seq
            ledger.stage(A, seq)
        elif not arrives and taken > applied:
            applied = taken
            ledger.record([Watermark(A, 1, applied)])
        assert (ledger.newest(A), ledger.applied(A)) == (taken, applied)
        assert ledger.judge_pull(A, taken) is Verdict.ANSWER
        assert ledger.judge_pull(A, taken + 1) is Verdict.GAP
