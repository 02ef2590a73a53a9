"""Figures by hand: summary, table, comparison, progress, metrics, run folder."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from deploy.folder import RunFolder, find_run, kernel_file, new_run_id
from deploy.graph.events import (
    ControlMeasured,
    CoordinatorStarted,
    Event,
    GroupFormed,
    GroupLeft,
    HeldOutMeasured,
    KernelConfirmed,
    LineageStarted,
    PhaseEntered,
    RunClosed,
    RunOpened,
    SampleLeft,
    SeedEvaluated,
    StepLearned,
    VersionPublished,
    event_to_dict,
)
from deploy.graph.plan import RunPlan
from deploy.graph.state import RunState
from deploy.observe import progress, report
from deploy.observe.environment import describe_environment
from deploy.observe.export import Exporter, RunMetrics
from deploy.observe.follow import Follower
from tasks.errors import UsageError

TASK = "procedural:row_norm/3"


def left(
    group: int, index: int, outcome: str, speedup: float | None = None, label: str = "", at_s: float = 0.0
) -> SampleLeft:
    return SampleLeft(
        at_s=at_s, sample_id=f"g{group}/{index}", group_id=f"g{group}", outcome=outcome, label=label, speedup=speedup,
        ci_low=None if speedup is None else speedup - 0.1, ci_high=None if speedup is None else speedup + 0.1,
        reference_ms=None if speedup is None else 2.0, new_tokens=100, file="kernels/x.py" if speedup else "",
        reason="incorrect" if outcome == "rejected" else "",
    )  # fmt: skip


def story() -> list[Event]:
    """One step of two samples by the frozen policy (a copy at 1.9, new at 1.2), two by the trained one (new at 1.5 and
    a wrong one); the 1.5 is confirmed at 1.4."""
    return [
        RunOpened(run_id="r1"),
        CoordinatorStarted(incarnation=1),
        SeedEvaluated(task_id=TASK, device_type="cpu", name="fused", outcome="accepted", speedup=1.9, reference_ms=2.0),
        PhaseEntered(phase="generating"),
        GroupFormed(group_id="g0", task_id=TASK, device_type="cpu", size=2, policy_step=0),
        left(0, 0, "accepted", 1.9, "copy", at_s=10),
        left(0, 1, "accepted", 1.2, "new", at_s=20),
        GroupLeft(group_id="g0", fate="trained"),
        StepLearned(epoch=0, step=1, metrics={"loss": 0.25}),
        GroupFormed(group_id="g1", task_id=TASK, device_type="cpu", size=2, policy_step=1),
        left(1, 0, "accepted", 1.5, "new", at_s=30),
        left(1, 1, "rejected", at_s=40),
        KernelConfirmed(
            task_id=TASK, sample_id="g1/0", outcome="accepted", speedup=1.4, ci_low=1.3, ci_high=1.5, reference_ms=2.1
        ),
        RunClosed(status="finished"),
    ]


def test_summary_by_hand() -> None:
    summary = report.summarize(RunState.replay(story()), [(TASK, "cpu")])
    task = summary["tasks"][0]
    assert task["best"] == {
        "sample": "g1/0", "policy_version": "", "speedup": 1.4, "ci_low": 1.3, "ci_high": 1.5, "label": "new",
        "confirmed": "accepted", "file": "kernels/x.py",
    }  # fmt: skip
    assert task["reference_ms"] == 2.1
    assert task["best_seed"] == 1.9
    assert summary["samples"]["accepted"] == 3
    assert summary["reasons"] == {"incorrect": 1}
    assert summary["copies"] == 1
    frozen, trained = summary["frozen_policy"]["frozen"], summary["frozen_policy"]["trained"]
    assert (frozen["samples"], frozen["new"], frozen["best_by_task"]) == (2, 1, {TASK: 1.2})
    assert (trained["samples"], trained["new"], trained["best_by_task"]) == (2, 1, {TASK: 1.5})
    assert json.loads(json.dumps(summary)) == summary


def test_where_the_time_went_by_hand() -> None:
    """Two scored samples of 30 tokens in a loop of 10 s generating and 50 s evaluating; two publications."""
    events: list[Event] = [
        RunOpened(run_id="r1", config_digest=""),
        *(PhaseEntered(phase=phase, at_s=at_s) for phase, at_s in (("seeding", 100.0), ("generating", 130.0))),
        VersionPublished(epoch=0, step=0, seconds_by_phase={"pause": 0.5, "transfer": 1.0}),
        GroupFormed(group_id="g1", task_id=TASK, device_type="cpu", size=3, policy_step=0),
        PhaseEntered(phase="evaluating", at_s=140.0),
        *(SampleLeft(sample_id=f"g1/{n}", group_id="g1", outcome="accepted", new_tokens=15) for n in (0, 1)),
        SampleLeft(sample_id="g1/2", group_id="g1", outcome="cancelled"),
        PhaseEntered(phase="closing", at_s=190.0),
        VersionPublished(epoch=0, step=1, seconds_by_phase={"pause": 0.1, "transfer": 2.0}),
    ]
    summary = report.summarize(RunState.replay(events), [])
    assert summary["speed"] == {
        "seconds_by_phase": {"seeding": 30.0, "generating": 10.0, "evaluating": 50.0}, "samples_per_minute": 2.0,
        "new_tokens": 30, "tokens_per_second_generating": 3.0, "publications": 2,
        "publish_seconds_by_phase": {"pause": 0.3, "transfer": 1.5},
    }  # fmt: skip
    assert report.speed_line(summary) == (
        "time: seeding 30 s, generating 10 s, evaluating 50 s, 2.00 samples/min, 3 tokens/s generating, "
        "weights published 2 times in 1.80 s each"
    )
    empty = report.summarize(RunState.replay([]), [])
    assert empty["speed"]["samples_per_minute"] is None


def controls(alarms: tuple[str, ...]) -> list[Event]:
    """Controls on one GPU type, oldest first, with these alarms."""
    return [
        ControlMeasured(
            device_type="H100", protocol="reward", task_id=TASK, outcome="accepted", measured=50 + number, failed=2,
            coverage=0.9, bias_log=0.02, half_width_log=0.03, alarm=alarm,
        )
        for number, alarm in enumerate(alarms)
    ]  # fmt: skip


def test_controls_in_the_summary_and_the_last_lines() -> None:
    calm = report.summarize(RunState.replay([*story(), *controls(("it is off", ""))]), [(TASK, "cpu")])
    assert calm["labels"] == []
    assert calm["controls"] == [{
        "device_type": "H100", "protocol": "reward", "measured": 51, "failed": 2, "coverage": 0.9,
        "bias": pytest.approx(0.0202, abs=1e-4), "mean_half_width": pytest.approx(0.03045, abs=1e-5), "alarm": "",
    }]  # fmt: skip
    assert report.control_lines(calm) == [
        "controls on H100 (reward): 51 measured, 2 failed, 90% cover 1, bias +2.02%, half-width 3.0%"
    ]
    alarmed = report.summarize(RunState.replay([*story(), *controls(("", "it is off"))]), [(TASK, "cpu")])
    assert alarmed["labels"] == ["control_alarm"]
    assert report.control_lines(alarmed)[0].endswith("; ALARM: it is off")
    assert report.control_lines(report.summarize(RunState.replay(story()), [])) == []


def test_an_alarm_is_said_once_and_is_in_the_metrics(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = RunFolder(tmp_path / "r1").create()
    values = [event_to_dict(event) for event in [*story(), *controls(("", "it is off", "it is more off"))]]
    follower = Follower(
        run, RunPlan("r1", ((TASK, "cpu"),)), lambda n: values[n : n + 1], lambda figures: None, metrics=RunMetrics()
    )  # fmt: skip
    for _ in values:
        follower.catch_up()
    said = [record.getMessage() for record in caplog.records]
    assert said == ["The evaluator is off on H100 under reward: it is off."]
    labels = {"device_type": "H100", "protocol": "reward"}
    figures = {
        name: REGISTRY.get_sample_value(f"kontrast_run_{name}", labels)
        for name in (
            "controls", "control_failures", "control_coverage", "control_bias", "control_half_width", "control_alarm",
        )
    }  # fmt: skip
    assert list(figures.values()) == [52, 2, 0.9, 0.02, 0.03, 1]


def test_the_table_shows_the_summarys_figures() -> None:
    text = report.plain_table(
        report.table_rows(report.summarize(RunState.replay(story()), [(TASK, "cpu"), ("x", "cpu")]))
    )
    head, _, first, second = text.splitlines()
    assert head.split("  ")[0] == "task"
    for part in (TASK, "2.10 ms", "1.40x", "1.30 to 1.50", "new, confirmed", "kernels/x.py"):
        assert part in first
    assert "none" in second


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, ["g1/0"]),
        ({"ci_low": 1.05}, []),
        ({"outcome": "rejected"}, []),
    ],
)
def test_a_winner_is_new_and_above_in_both_measurements(change: dict[str, Any], found: list[str]) -> None:
    events = [e.model_copy(update=change) if isinstance(e, KernelConfirmed) else e for e in story()]
    assert report.winners(RunState.replay(events), 1.05) == found
    copies = [e.model_copy(update={"label": "copy"}) if isinstance(e, SampleLeft) else e for e in events]
    assert report.winners(RunState.replay(copies), 1.05) == []


def test_progress_line_by_hand() -> None:
    """4 of 4 samples and 1 of 2 steps done of 2 x 1 x 2 samples: (4 + 1 x 2 / 4) / (4 x 1.25) = 0.9 of the work. The
    loop took 20 s generating, 10 s evaluating and 15 s generating until now, so 45 x 0.1 / 0.9 = 5 s are left; 400
    tokens in the 20 s of the generating that has ended."""
    phases = [("seeding", 50), ("generating", 100), ("evaluating", 120), ("generating", 130)]
    entered = [PhaseEntered(phase=phase, at_s=at_s) for phase, at_s in phases]  # type: ignore[arg-type]
    state = RunState.replay([*(e for e in story() if not isinstance(e, PhaseEntered)), *entered])
    plan = RunPlan("r1", ((TASK, "cpu"),), groups_per_step=1, samples_per_group=2)
    figures = progress.measure(state, plan, started_s=55.0, now_s=145.0)
    assert figures.left_s == pytest.approx(5.0)
    assert figures.tokens_per_s == pytest.approx(20.0)
    assert progress.line(figures) == (
        "1:30 generating | step 1/2 | samples: 3 accepted, 1 rejected, 0 in flight | best new: row_norm/3 1.50x | "
        "20 tokens/s | about 0:05 left"
    )


def test_duration() -> None:
    assert [progress.duration(s) for s in (0, 59.6, 3599, 3600)] == ["0:00", "1:00", "59:59", "1:00:00"]


def test_a_follower_writes_each_event_once_also_when_it_comes_back(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "r1").create()
    values = [event_to_dict(event) for event in story()]
    plan, shown = RunPlan("r1", ((TASK, "cpu"),)), []
    first = Follower(run, plan, lambda n: values[n:5], shown.append)
    first.catch_up()
    second = Follower(run, plan, lambda n: values[n:], shown.append)
    second.catch_up()
    second.catch_up()
    second.show()
    assert [json.loads(line) for line in run.events.read_text().splitlines()] == values
    assert second.summarize()["status"] == "finished"
    assert json.loads((run.path / "summary.json").read_text())["run_id"] == "r1"
    assert shown[0].step == 1


def test_metrics_are_served_and_announced(tmp_path: Path) -> None:
    state = RunState.replay(story())
    before = REGISTRY.get_sample_value("kontrast_run_tokens_total") or 0.0
    RunMetrics().update(state, story())
    exporter = Exporter(tmp_path, "run").start()
    try:
        [file] = tmp_path.glob("*.json")
        [target] = json.loads(file.read_text())
        with urllib.request.urlopen(f"http://{target['targets'][0]}/metrics", timeout=5) as answer:
            text = answer.read().decode()
    finally:
        exporter.stop()
        exporter.stop()
    assert 'kontrast_run_samples{state="accepted"} 3.0' in text
    assert 'kontrast_run_phase{phase="generating"} 1.0' in text
    assert 'kontrast_run_learner_figure{figure="loss"} 0.25' in text
    assert REGISTRY.get_sample_value("kontrast_run_tokens_total") == before + 400
    assert not list(tmp_path.iterdir())


def test_run_ids_and_finding_them(tmp_path: Path) -> None:
    assert new_run_id("My Run", 0.0).startswith("19700101-000000-my-run-")
    for name in ("20260101-a", "20260102-b"):
        RunFolder(tmp_path / name).create().write_text("config.toml", "")
    assert find_run(tmp_path, "20260102").name == "20260102-b"
    assert find_run(tmp_path, str(tmp_path / "20260101-a")).name == "20260101-a"
    with pytest.raises(UsageError, match="2 runs begin with 2026"):
        find_run(tmp_path, "2026")
    with pytest.raises(UsageError, match="latest there are 20260101-a, 20260102-b"):
        find_run(tmp_path, "1999")


def test_a_kernel_file_stays_inside_the_run_folder() -> None:
    assert kernel_file("../../etc", "r1-g0/1") == "kernels/etc/r1-g0-1.py"
    assert kernel_file("procedural:row_norm/17", "a/0") == "kernels/procedural-row_norm-17/a-0.py"


def test_an_unwritable_run_folder_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"set run\.folder"):
        RunFolder(tmp_path / "file" / "r1").create()


def test_the_environment_holds_versions_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret_value")
    described = json.dumps(describe_environment())
    assert "hf_secret_value" not in described
    assert '"torch"' in described


def test_held_out_figures_are_in_the_summary_and_exported() -> None:
    """The latest of each set counts; a lost lineage's figures go with it."""
    figures: dict[str, Any] = {
        "name": "new", "device_type": "cpu", "exemplars": False, "epoch": 0, "prompts": 2, "samples": 8, "unscored": 0,
        "accepted_share": 0.5, "above_share": 0.25, "distinct_accepted": 3, "copies": 0,
    }  # fmt: skip
    events = [HeldOutMeasured(step=step, mean_log_speedup=0.1 * step, **figures) for step in (0, 2, 4)]
    state = RunState.replay([RunOpened(run_id="r1"), *events])
    summary = report.summarize(state, [])
    assert [(row["step"], row["mean_log_speedup"]) for row in summary["held_out"]] == [(0, 0.0), (2, 0.2), (4, 0.4)]
    rest = "50% accepted, 25% above 1.05, 3 distinct of 8"
    assert report.held_out_lines(summary) == [
        f"held out, new on cpu, without exemplars: step 0: mean log-speedup 0.000, {rest}; "
        f"step 4: mean log-speedup 0.400, {rest}"
    ]
    RunMetrics().update(state, events)
    labels = {"set": "new", "device_type": "cpu", "exemplars": "none", "figure": "mean_log_speedup"}
    assert REGISTRY.get_sample_value("kontrast_run_held_out", labels) == pytest.approx(0.4)
    state.apply(LineageStarted(epoch=1, step=2))
    assert [row["step"] for row in report.summarize(state, [])["held_out"]] == [0, 2]
