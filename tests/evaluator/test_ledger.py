"""The ledger of compared calls."""

from __future__ import annotations

from evaluator.judgement import CallLedger, CallResult


def test_calls_are_counted_apart_by_kind_step_and_parameters() -> None:
    ledger = CallLedger()
    for call in (
        CallResult(bit_equal=True),
        CallResult(worst_ratio=0.5),
        CallResult(kind="scaled"),
        CallResult(step="time"),
        CallResult(reloaded=True),
    ):
        ledger.add(call)
    tallies = ledger.tallies()
    assert [(t.kind, t.step, t.reloaded, t.calls) for t in tallies] == [
        ("as_given", "check", False, 2),
        ("scaled", "check", False, 1),
        ("as_given", "time", False, 1),
        ("as_given", "check", True, 1),
    ]
    assert (tallies[0].right, tallies[0].bit_equal, tallies[0].worst_ratio) == (2, 1, 0.5)


def test_the_first_wrong_call_of_each_aspect_is_kept() -> None:
    ledger = CallLedger()
    ledger.add(CallResult(aspects=("budget",), call=4))
    ledger.add(CallResult(aspects=("masks", "budget"), call=5))
    (tally,) = ledger.tallies()
    assert tally.wrong == {"budget": 2, "masks": 1}
    assert (tally.first["budget"].call, tally.first["masks"].call, tally.right) == (4, 5, 0)


def test_the_size_does_not_grow_with_the_number_of_calls() -> None:
    ledger = CallLedger()
    for number in range(1000):
        ledger.add(CallResult(step="time", call=number, aspects=("budget",)))
    assert len(ledger.tallies()) == 1
    assert len(ledger.tallies()[0].model_dump_json()) < 1500
