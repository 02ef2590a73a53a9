"""Facts first, then rules: what was seen, and what it means under declared rules.

Invariants: everything here is pure and imports neither torch nor a clock; a verdict follows from facts and rules alone,
never from words of the candidate's source; a fault that was proven stays, whatever happens later; rules can forgive a
policy, never a cheat.
"""

from evaluator.judgement.facts import CallResult, Facts
from evaluator.judgement.judge import Verdict, first_fault, judge
from evaluator.judgement.ledger import CallLedger
from evaluator.judgement.rules import Rules

__all__ = ["CallLedger", "CallResult", "Facts", "Rules", "Verdict", "first_fault", "judge"]
