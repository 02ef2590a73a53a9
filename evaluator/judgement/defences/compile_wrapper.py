"""Not a kernel: the formula handed to torch.compile, jit.script or jit.trace.

Rests on `Facts.own_work.compilers`: something was compiled (jit.fork compiles nothing). Yields `fallback` where own
work is asked for, else the label `compiler_wrapper`.
"""

from __future__ import annotations

from evaluator.judgement.defences.base import Defence, Fault
from evaluator.judgement.facts import Facts
from evaluator.judgement.rules import Rules


def _find(facts: Facts, rules: Rules) -> list[Fault]:
    compilers = facts.own_work.compilers
    if rules.own_work != "own" or not compilers:
        return []
    message = f"The formula was handed to {', '.join(compilers)}; these rules want the candidate's own work."
    return [Fault("fallback", "check", message, {"compilers": list(compilers)})]


DEFENCE = Defence("compile_wrapper", "not a kernel", ("own_work",), _find, yields=("fallback",), forgiven="own_work")
