"""Rules: presets, single keys, and what they forgive."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from evaluator.judgement import CallLedger, CallResult, Facts, Rules, judge
from evaluator.judgement.facts import Alias, DrawTally, ExpectedLeaf, GlobalState, LeafFacts, OutputFacts, OwnWork
from tasks.records import Measurement

MEASURED = Measurement(speedup=2.0, ci_low=1.9, ci_high=2.1, reference_ms=2.0, candidate_ms=1.0, pairs=20)
FAR_OFF = CallResult(aspects=("budget",), loose_ok=False)
LOOSELY_RIGHT = CallResult(aspects=("budget",), loose_ok=True, half_like=True)


def tallies(*calls: CallResult) -> tuple[DrawTally, ...]:
    ledger = CallLedger()
    for call in calls:
        ledger.add(call)
    return ledger.tallies()


def outcome(rules: Rules, **seen: object) -> str:
    return judge(Facts(**{"step": "time", "measurement": MEASURED, **seen}), rules).outcome


HALF_OUTPUT = OutputFacts(leaves=(LeafFacts(dtype="float16"),), expected=(ExpectedLeaf(dtype="float32"),))

FORGIVEN: list[tuple[str, set[str], dict[str, object]]] = [
    ("compiler", {"paper", "any"}, {"own_work": OwnWork(compilers=("torch.compile",))}),
    ("handler", {"paper", "any"}, {"own_work": OwnWork(calls_traced=1, calls_with_swallowed=1)}),
    ("static output", {"paper", "any"}, {"aliases": (Alias(target="earlier_output"),)}),
    ("half inside", {"paper", "any"}, {"draws": tallies(LOOSELY_RIGHT)}),
    ("half output", {"any"}, {"outputs": (HALF_OUTPUT,)}),
    ("folded weights", {"paper", "any"}, {"draws": tallies(FAR_OFF.model_copy(update={"reloaded": True}))}),
    ("sampler's shortcut", {"paper", "any"}, {"draws": tallies(FAR_OFF.model_copy(update={"kind": "flipped"}))}),
    ("parameters never taken", {"paper", "any"}, {"parameters_missing": ("fc.weight",)}),
    ("wrong", set(), {"draws": tallies(FAR_OFF)}),
    ("replay", set(), {"draws": tallies(CallResult(aspects=("stale",)))}),
    ("NaN", set(), {"draws": tallies(CallResult(aspects=("masks",)))}),
    ("tampering", set(), {"global_state": GlobalState(replaced=("time.time",))}),
    ("returns its input", set(), {"aliases": (Alias(target="input"),)}),
]


@pytest.mark.parametrize(("name", "forgiving", "seen"), FORGIVEN, ids=[name for name, _, _ in FORGIVEN])
def test_what_each_preset_forgives(name: str, forgiving: set[str], seen: dict[str, object]) -> None:
    assert outcome(Rules.preset("strict"), **seen) == "rejected"
    for preset in ("paper", "any"):
        wanted = "accepted" if preset in forgiving else "rejected"
        assert outcome(Rules.preset(preset), **seen) == wanted, preset  # type: ignore[arg-type]


def test_a_single_key_overrides_its_preset() -> None:
    rules = Rules.preset("strict", output_lifetime="next_call")
    assert rules.name == "strict"
    assert outcome(rules, aliases=(Alias(target="earlier_output"),)) == "accepted"
    assert outcome(rules, own_work=OwnWork(compilers=("torch.compile",))) == "rejected"


def test_unknown_keys_and_values_are_refused() -> None:
    with pytest.raises(ValidationError):
        Rules.preset("strict", output_livetime="caller")
    with pytest.raises(ValidationError):
        Rules.preset("strict", precision="fp64")


def test_the_default_is_strict() -> None:
    assert Rules() == Rules.preset("strict")
