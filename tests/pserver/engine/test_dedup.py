from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fleet_sparse.core.watermark import Watermark
from fleet_sparse.pserver.engine.dedup import DedupLedger, Verdict

A, B = b"a" * 16, b"b" * 16


def ledger_at(watermark: int) -> DedupLedger:
    return DedupLedger([Watermark(A, 1, watermark)])


def test_pull_waits_for_its_floor() -> None:
    assert ledger_at(5).judge_pull(A, 5) is Verdict.ANSWER
    assert ledger_at(5).judge_pull(A, 6) is Verdict.GAP


def test_ledger_of_its_watermarks_is_the_same_ledger() -> None:
    watermarks = [Watermark(A, 3, 5), Watermark(B, 1, 9)]
    assert DedupLedger(DedupLedger(watermarks).watermarks()).watermarks() == watermarks


# Pushes that are applied later


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


# A shard that was started again


def test_pushes_that_are_not_sent_again_count_as_applied() -> None:
    ledger = ledger_at(5)
    ledger.skip_to(Watermark(A, 1, 9))
    assert ledger.judge_push(A, 9) is Verdict.ANSWER
    assert ledger.judge_push(A, 10) is Verdict.NEW


def test_ledger_never_forgets_a_push() -> None:
    ledger = ledger_at(5)
    ledger.skip_to(Watermark(A, 1, 3))
    assert ledger.applied(A) == 5
