"""Every rejection reason from hand-made facts, beside a benign twin that looks alike and is accepted."""

from __future__ import annotations

import pytest

from evaluator.judgement import CallLedger, CallResult, Facts, Rules, first_fault, judge
from evaluator.judgement.defences import ALL_DEFENCES, DEFENCES
from evaluator.judgement.facts import (
    Alias,
    CompileFacts,
    Confirmation,
    Degenerate,
    Determinism,
    DrawTally,
    Ending,
    ExpectedLeaf,
    GlobalState,
    Growth,
    Infrastructure,
    LeafFacts,
    OutputFacts,
    OwnWork,
    Pending,
    ScreenFacts,
    TimerFacts,
)
from evaluator.judgement.judge import PRECEDENCE, accepted_message
from evaluator.judgement.rules import MIB
from tasks.records import Measurement
from tasks.records.evaluation import REJECTION_REASONS

STRICT = Rules.preset("strict")
MEASURED = Measurement(speedup=2.0, ci_low=1.9, ci_high=2.1, reference_ms=2.0, candidate_ms=1.0, pairs=20)


def facts(**seen: object) -> Facts:
    """Facts of a finished, right, measured candidate, with what is given seen besides."""
    return Facts(**{"step": "time", "measurement": MEASURED, "draws": tallies(CallResult()), **seen})


def tallies(*calls: CallResult) -> tuple[DrawTally, ...]:
    ledger = CallLedger()
    for call in calls:
        ledger.add(call)
    return ledger.tallies()


def output(expected: dict[str, object] | None = None, **leaf: object) -> tuple[OutputFacts, ...]:
    """One output of shape (2, 3), dense float32, changed as given."""
    shape = {"shape": (2, 3), "stride": (3, 1), "storage_bytes": 24, "needed_bytes": 24}
    wanted = {"shape": (2, 3), **(expected or {})}
    return (OutputFacts(leaves=(LeafFacts(**{**shape, **leaf}),), expected=(ExpectedLeaf(**wanted),)),)


def wrong(*aspects: str, **more: object) -> CallResult:
    return CallResult(aspects=aspects, got="1", expected="2", error="1", allowed="1e-6", **{"loose_ok": False, **more})


RIGHT = CallResult()

REJECTED: dict[str, tuple[str, str, dict[str, object]]] = {
    "no syntax": ("contract", "screen", {"screen": ScreenFacts(syntax_error="line 3: invalid syntax")}),
    "no ModelNew": ("contract", "screen", {"screen": ScreenFacts(names_model=False)}),
    "source too long": ("contract", "screen", {"screen": ScreenFacts(too_long=True, source_bytes=10**6)}),
    "wrong constructor": ("contract", "early_exit", {"ending": Ending(kind="contract", step="load", detail="x")}),
    "takes no parameters": ("contract", "parameter_tracking", {"parameters_missing": ("fc.weight",)}),
    "does not compile": ("compile_error", "compile", {"compile": CompileFacts(failed=True, error="a.cu(3): error")}),
    "off-schema message": ("forged_result", "channel_schema", {"channel_error": "not JSON"}),
    "timer claims more than the span shows": (
        "forged_result",
        "timer_disagreement",
        {"timers": TimerFacts(turns=20, native_log=2.0, span_log=0.0, span_error_log=0.02)},
    ),
    "patched torch": ("tampering", "global_state", {"global_state": GlobalState(replaced=("torch.allclose",))}),
    "killed the zygote": ("tampering", "early_exit", {"ending": Ending(kind="zygote_died", step="time")}),
    "hangs": ("timeout", "early_exit", {"ending": Ending(kind="deadline", step="check", detail="10 s for one call")}),
    "raises": ("crash", "early_exit", {"ending": Ending(kind="exception", step="check", detail="ValueError")}),
    "leaves with code 0": ("crash", "early_exit", {"ending": Ending(kind="exit", step="time", detail="code 0")}),
    "segfault": ("crash", "early_exit", {"ending": Ending(kind="signal", step="check", detail="SIGSEGV")}),
    "tensor subclass": ("lazy_output", "output_type", {"outputs": output(plain=False, type_name="Later")}),
    "shadowed methods": ("lazy_output", "output_type", {"outputs": output(attributes=17)}),
    "no storage": ("lazy_output", "output_type", {"outputs": output(storage_bytes=0)}),
    "sparse layout": ("lazy_output", "output_type", {"outputs": output(layout="sparse_coo")}),
    "left on the host": ("lazy_output", "output_type", {"outputs": output({"device": "cuda:0"}, device="cpu")}),
    "thread still writes": ("lazy_output", "pending_work", {"pending": Pending(late_writes=1, idle_ms=20)}),
    "input destroyed": ("input_mutation", "input_mutation", {"inputs_changed": ("0",)}),
    "returns its input": ("aliasing", "aliasing", {"aliases": (Alias(target="input"),)}),
    "returns a parameter": ("aliasing", "aliasing", {"aliases": (Alias(target="parameter"),)}),
    "expanded view": ("aliasing", "aliasing", {"outputs": output(stride=(0, 1))}),
    "overlapping windows": ("aliasing", "aliasing", {"outputs": output(stride=(1, 1))}),
    "one buffer for all calls": ("aliasing", "output_lifetime", {"aliases": (Alias(target="earlier_output"),)}),
    "earlier result overwritten": ("aliasing", "output_lifetime", {"earlier_result_changed": True}),
    "constant on a degenerate task": (
        "constant_output",
        "degenerate_task",
        {"degenerate": Degenerate(task=True, output_repeats=True)},
    ),
    "ignores NaN on a degenerate task": (
        "constant_output",
        "degenerate_task",
        {"degenerate": Degenerate(task=True, ignores_poison=True)},
    ),
    "replays an answer": ("caching", "stale_result", {"draws": tallies(RIGHT, wrong("stale"))}),
    "half precision throughout": (
        "precision_downgrade",
        "error_budget",
        {"draws": tallies(*[wrong("budget", half_like=True, loose_ok=True)] * 3)},
    ),
    "wrong once": ("incorrect", "error_budget", {"draws": tallies(RIGHT, wrong("budget", half_like=True))}),
    "far off": ("incorrect", "error_budget", {"draws": tallies(wrong("budget"))}),
    "never written": ("incorrect", "error_budget", {"draws": tallies(wrong("unwritten"))}),
    "NaN everywhere": ("incorrect", "nan_masks", {"draws": tallies(wrong("masks"))}),
    "broadcastable column": ("incorrect", "output_dtype_shape", {"outputs": output({"shape": (2, 4)})}),
    "another dtype": ("incorrect", "output_dtype_shape", {"outputs": output(dtype="uint8")}),
    "half output": ("incorrect", "output_dtype_shape", {"outputs": output(dtype="float16")}),
    "out of bounds": ("incorrect", "guard_bands", {"guards_broken": ("slot 0 behind",)}),
    "running statistics not kept": ("incorrect", "input_mutation", {"buffers_wrong": ("bn.running_mean",)}),
    "another answer the second time": (
        "state_leak",
        "determinism",
        {"determinism": Determinism(repeats=2, differing=1)},
    ),
    "reference slower beside it": (
        "stream_escape",
        "stream_escape",
        {"timers": TimerFacts(turns=20, reference_slowdown_log=0.5, slowdown_error_log=0.05)},
    ),
    "computes after the return": ("timing_escape", "pending_work", {"pending": Pending(idle_ms=20, busy_ms=18)}),
    "no native times": ("timing_escape", "timer_disagreement", {"timers": TimerFacts(turns=0, missing_turns=3)}),
    "hoards memory": ("resource_abuse", "state_growth", {"growth": Growth(host_bytes=300 * MIB, calls=24)}),
    "hoards memory fast": ("resource_abuse", "state_growth", {"growth": Growth(host_bytes=1100 * MIB, calls=5)}),
    "hoards device memory": ("resource_abuse", "state_growth", {"growth": Growth(device_bytes=300 * MIB, calls=24)}),
    "orphan process": ("resource_abuse", "pending_work", {"pending": Pending(processes=1)}),
    "over the memory limit": ("resource_abuse", "early_exit", {"ending": Ending(kind="memory_limit", step="check")}),
    "starves the reference": (
        "resource_abuse",
        "early_exit",
        {"ending": Ending(kind="reference_failed_beside", step="time")},
    ),
    "compiler wrapper": ("fallback", "compile_wrapper", {"own_work": OwnWork(compilers=("torch.compile",))}),
    "handler on every call": (
        "fallback",
        "fallback",
        {"own_work": OwnWork(calls_traced=2, calls_with_swallowed=2, swallowed=("OSError at line 9",))},
    ),
    "kernel failed and was survived": ("fallback", "fallback", {"own_work": OwnWork(kernels_failed=1)}),
    "kernel never called": ("fallback", "fallback", {"own_work": OwnWork(kernels_built=1, kernels_called=0)}),
    "decoy kernel": (
        "fallback",
        "fallback",
        {"own_work": OwnWork(kernels_built=1, kernels_called=2, output_depends_on_kernel=False)},
    ),
    "found the reference": ("fallback", "fallback", {"own_work": OwnWork(found_reference=True)}),
    "not confirmed": (
        "not_confirmed",
        "confirmation",
        {"confirmation": Confirmation(speedup=0.9, ci_low=0.85, ci_high=0.95)},
    ),
    "buckets vary": ("not_confirmed", "confirmation", {"unstable": "the variance of the bucket means is 0.2"}),
}

ACCEPTED: dict[str, dict[str, object]] = {
    "plain": {},
    "transposed layout": {"outputs": output(stride=(1, 2))},
    "length-one dimension with any stride": {"outputs": output({"shape": (1, 6)}, shape=(1, 6), stride=(0, 1))},
    "larger storage": {"outputs": output(storage_bytes=4096)},
    "aliases where the reference does": {"aliases": (Alias(target="input", reference_too=True),)},
    "idle threads": {"pending": Pending(idle_ms=20, busy_ms=0.3)},
    "constant work space": {"growth": Growth(host_bytes=255 * MIB, calls=100)},
    "large calls keep a few": {"growth": Growth(host_bytes=350 * MIB, bytes_per_call=100 * MIB, calls=100)},
    "an allocator's reserve that levelled off": {
        "growth": Growth(host_bytes=500 * MIB, calls=100, still_growing=False)
    },
    "an allocator's reserve, not yet level": {"growth": Growth(host_bytes=500 * MIB, calls=12)},
    "degenerate task, honest candidate": {"degenerate": Degenerate(task=True, adversaries=("zeros",))},
    "constant on a sound task is the comparison's": {"degenerate": Degenerate(output_repeats=True)},
    "reference does not repeat either": {"determinism": Determinism(reference_repeats=False, repeats=2, differing=2)},
    "settings at rest": {"global_state": GlobalState(settings=("cudnn.benchmark False->True",))},
    "handler on the first call only": {
        "own_work": OwnWork(calls_traced=2, calls_with_swallowed=1, swallowed=("AttributeError at line 5",))
    },
    "own kernels that run": {
        "own_work": OwnWork(kernels_built=2, kernels_called=4, output_depends_on_kernel=True, custom_share=0.9)
    },
    "timers agree": {"timers": TimerFacts(turns=20, native_log=0.70, span_log=0.69, span_error_log=0.01)},
    "span too coarse to contradict": {
        "timers": TimerFacts(turns=20, native_log=0.70, span_log=0.5, span_error_log=0.2)
    },
    "slower than the span shows": {"timers": TimerFacts(turns=20, native_log=0.0, span_log=0.5, span_error_log=0.01)},
    "noise of the reference": {"timers": TimerFacts(turns=20, reference_slowdown_log=0.08, slowdown_error_log=0.05)},
    "confirmed": {"confirmation": Confirmation(speedup=1.95, ci_low=1.9, ci_high=2.0)},
    "confirmed lower, on a cpu": {"confirmation": Confirmation(speedup=1.5, ci_low=1.4, ci_high=1.6)},
    "ended early is not asked of facts without an ending": {"step": "confirm"},
}


@pytest.mark.parametrize("name", REJECTED)
def test_each_fault_is_rejected_for_its_reason(name: str) -> None:
    reason, defence, seen = REJECTED[name]
    verdict = judge(facts(**seen), STRICT)
    assert (verdict.outcome, verdict.reason, verdict.detail["defence"]) == ("rejected", reason, defence)
    assert verdict.message.endswith((".", "error"))


@pytest.mark.parametrize("name", [name for name, (_, defence, _) in REJECTED.items() if defence in DEFENCES])
def test_without_its_defence_the_fault_is_let_through(name: str) -> None:
    _, defence, seen = REJECTED[name]
    others = [known for known in ALL_DEFENCES if known != defence]
    assert judge(facts(**seen), STRICT, others).outcome == "accepted"


def test_each_defence_yields_what_it_says() -> None:
    yielded: dict[str, set[str]] = {name: set() for name in DEFENCES}
    for reason, defence, _ in REJECTED.values():
        if defence in DEFENCES:
            yielded[defence].add(reason)
    assert yielded == {name: set(defence.yields) for name, defence in DEFENCES.items()}


OTHER_RULES: dict[str, tuple[object, ...]] = {
    "own_work": ("labelled",), "precision": ("loose", "as_given"), "output_lifetime": ("next_call",),
    "weights": ("seeded",), "domain": ("drawn",), "growth_bytes": (MIB, 4096 * MIB), "growth_calls": (0.5, 50.0),
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name, defence in DEFENCES.items() if defence.yields])
def test_each_defence_names_the_rules_that_forgive_what_it_finds(name: str) -> None:
    """`docs/labels.md` says from these which rule sets count a reason."""
    assert set(OTHER_RULES) == set(Rules.model_fields) - {"name"}
    defence = DEFENCES[name]
    beyond = [wrong(aspect, **more) for aspect in ("masks", "budget", "stale")
              for more in ({"kind": "flipped"}, {"reloaded": True})]  # fmt: skip
    seen = [facts(**one) for one in (*ACCEPTED.values(), *(one for _, _, one in REJECTED.values()))]
    seen += [facts(draws=tallies(RIGHT, call)) for call in beyond]
    found = set()
    for key, values in OTHER_RULES.items():
        other = {value: Rules(**{key: value}) for value in values}
        changing = [
            value
            for value in values
            if any(defence.find(one, STRICT) != defence.find(one, other[value]) for one in seen)
        ]
        if changing:
            whole = len(changing) == len(values) or not isinstance(values[0], str)
            found.add(key if whole else f"{key}={changing[0]}")
    assert found == set(defence.softened) | ({defence.forgiven} - {""})
    if defence.forgiven:
        for value in OTHER_RULES[defence.forgiven]:
            assert not any(defence.find(one, Rules(**{defence.forgiven: value})) for one in seen)


@pytest.mark.parametrize("name", ACCEPTED)
def test_benign_twins_are_accepted(name: str) -> None:
    verdict = judge(facts(**ACCEPTED[name]), STRICT)
    assert verdict.outcome == "accepted", verdict.message


def test_every_reason_of_the_vocabulary_has_a_place_in_the_order() -> None:
    assert sorted(PRECEDENCE) == sorted(REJECTION_REASONS)


def test_every_reason_is_reached_but_the_one_that_no_defence_can_prove() -> None:
    """`hyperparameter` is a word for readers of records: what shows it is a wrong value, which is `incorrect`."""
    assert {reason for reason, _, _ in REJECTED.values()} == set(REJECTION_REASONS) - {"hyperparameter", "review"}


def test_every_defence_has_a_fault_here_or_governs_calls() -> None:
    governing = {"whole_domain", "every_call"}
    assert {defence for _, defence, _ in REJECTED.values()} & set(ALL_DEFENCES) == set(ALL_DEFENCES) - governing


@pytest.mark.parametrize(
    ("defence", "call"),
    [
        ("whole_domain", wrong("masks", kind="flipped")),
        ("whole_domain", wrong("budget", kind="exact")),
        ("parameter_tracking", wrong("budget", reloaded=True)),
        ("parameter_tracking", wrong("stale", reloaded=True)),
        ("every_call", wrong("budget", step="time")),
        ("every_call", wrong("stale", step="confirm")),
    ],
)
def test_governing_defences_decide_whether_a_call_counts(defence: str, call: CallResult) -> None:
    seen = facts(draws=tallies(RIGHT, call))
    others = [known for known in ALL_DEFENCES if known != defence]
    assert judge(seen, STRICT).outcome == "rejected"
    assert judge(seen, STRICT, others).outcome == "accepted"
    forgiven = DEFENCES[defence].forgiven
    for value in OTHER_RULES.get(forgiven, ()):
        assert judge(seen, Rules(**{forgiven: value})).outcome == "accepted"
    assert judge(facts(draws=tallies(RIGHT, wrong("budget"))), STRICT, others).outcome == "rejected"


def test_the_most_telling_reason_decides() -> None:
    """A tampered process comes before its wrong values, a wrong value before a policy."""
    seen = facts(
        global_state=GlobalState(replaced=("torch.equal",)),
        draws=tallies(wrong("budget")),
        own_work=OwnWork(compilers=("torch.compile",)),
    )
    verdict = judge(seen, STRICT)
    assert verdict.reason == "tampering"
    assert verdict.detail["also"] == ["fallback", "incorrect"]
    untampered = judge(seen.model_copy(update={"global_state": GlobalState()}), STRICT)
    assert untampered.reason == "incorrect"


def test_a_proven_fault_stands_above_a_failure_of_ours() -> None:
    lost = Infrastructure(reason="device_fault", detail="The health probe failed.")
    assert judge(facts(draws=tallies(wrong("budget")), infrastructure=lost), STRICT).outcome == "rejected"
    verdict = judge(facts(infrastructure=lost), STRICT)
    assert (verdict.outcome, verdict.reason, verdict.message) == (
        "unscored",
        "device_fault",
        "The health probe failed.",
    )


def test_silence_is_never_a_success() -> None:
    verdict = judge(Facts(step="check"), STRICT)
    assert (verdict.outcome, verdict.reason) == ("unscored", "evaluator_lost")


def test_first_fault_is_none_while_nothing_is_wrong() -> None:
    assert first_fault(Facts(), STRICT) is None
    found = first_fault(Facts(inputs_changed=("0",)), STRICT)
    assert found is not None
    assert found.reason == "input_mutation"


def test_the_message_shows_where_and_how_wrong() -> None:
    call = wrong("budget", leaf="1.hidden", index=(3, 4), kind="shifted", reloaded=True)
    message = judge(facts(draws=tallies(call)), STRICT).message
    assert message == (
        "Wrong value: output 1.hidden at [3, 4] is 1, expected 2 (error 1, allowed 1e-6), on shifted inputs after the "
        "parameters were changed."
    )


def test_confirmation_lets_the_lower_value_score_on_a_cpu_only() -> None:
    lower = Confirmation(speedup=1.5, ci_low=1.4, ci_high=1.6)
    on_cpu = judge(facts(confirmation=lower), STRICT)
    assert on_cpu.measurement is not None
    assert (on_cpu.measurement.speedup, on_cpu.measurement.ci_low, on_cpu.measurement.confirmed) == (1.5, 1.4, False)
    on_gpu = facts(confirmation=lower, measurement=MEASURED.model_copy(update={"device_type": "H100"}))
    assert judge(on_gpu, STRICT).reason == "not_confirmed"
    agreed = judge(facts(confirmation=Confirmation(speedup=2.3, ci_low=2.05, ci_high=2.5)), STRICT)
    assert agreed.measurement is not None
    assert agreed.measurement.confirmed


def test_a_score_below_its_times_says_why() -> None:
    assert "usual calls" not in accepted_message(MEASURED)
    lowered = accepted_message(MEASURED.model_copy(update={"speedup": 1.5, "ci_low": 1.4, "ci_high": 1.6}))
    assert lowered.startswith(
        "Right on every call; 1.50x the reference's speed (1.40 to 1.60). Its usual calls alone would"
    )
    assert "say 2.00x" in lowered
