"""Fresh secret inputs for every timed call: a draw of its own, scaled a little.

No call shares anything with another. Inputs mixed from a few draws would let a candidate keep the results of these and
make each call's answer up from them: cheap where the task is linear. The factor tells calls apart whose inputs the task
draws as constants.
"""

from __future__ import annotations

import random
from typing import Any

from evaluator.reference.domain import Domain, transformed
from evaluator.reference.subject import Subject

FACTOR_LOW = 0.9
"""Values shrink by at most this factor, so that bounded inputs stay within their bounds."""


def timed_inputs(subject: Subject, domain: Domain, seed: int) -> list[Any]:
    """Inputs of a timed call under its secret seed; integers, bools and masks are drawn and never altered."""
    factor = random.Random(f"timed/{seed}").uniform(FACTOR_LOW, 1.0)
    return transformed(subject.draw(seed), domain.traits, scale=factor)
