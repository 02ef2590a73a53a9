from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.config import GroupsConfig
from learner.importance import importance_weights
from tasks.errors import KontrastError


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


OLD = f64(0.5, 0.5, 0.5, 0.5).log()
SAMPLER = f64(0.25, 0.1, 1.0, 0.4).log()
"""Ratios 2, 5, 0.5, 1.25."""


@pytest.mark.parametrize(
    ("correction", "expected", "cut"),
    [
        ("truncated", [2.0, 2.0, 0.5, 1.25], 1),
        ("masked", [2.0, 0.0, 0.0, 1.25], 2),
        ("none", [1.0, 1.0, 1.0, 1.0], 0),
    ],
)
def test_token_weights_by_hand(correction: str, expected: list[float], cut: int) -> None:
    """Cap 2, floor 0.6: truncation caps the 5, the mask drops the 5 and the 0.5."""
    config = GroupsConfig(correction=correction, correction_cap=2.0, correction_floor=0.6)
    weights, count = importance_weights(OLD, SAMPLER, config)
    torch.testing.assert_close(weights, f64(*expected))
    assert count == cut


def test_whole_sequences_are_masked_by_their_geometric_mean() -> None:
    """Sequences of 2 tokens: ratios 2 and 5 have mean sqrt(10) = 3.16 > 2, dropped; 0.5 and 1.25 have sqrt(0.625) =
    0.79, kept as they are."""
    config = GroupsConfig(correction="sequence_masked", correction_cap=2.0, correction_floor=0.6)
    weights, cut = importance_weights(OLD, SAMPLER, config, [2, 2])
    torch.testing.assert_close(weights, f64(0.0, 0.0, 0.5, 1.25))
    assert cut == 2
    with pytest.raises(KontrastError, match="needs the lengths"):
        importance_weights(OLD, SAMPLER, config)


def test_a_kept_sequence_is_still_truncated() -> None:
    """Ratios 5 and 0.5: mean sqrt(2.5) = 1.58 passes; the 5 is capped."""
    config = GroupsConfig(correction="sequence_masked", correction_cap=2.0)
    weights, cut = importance_weights(OLD[1:3], SAMPLER[1:3], config, [2])
    torch.testing.assert_close(weights, f64(2.0, 0.5))
    assert cut == 1


@settings(deadline=None)
@given(st.permutations(range(4)), st.sampled_from(["truncated", "masked", "sequence_masked", "none"]))
def test_weights_follow_their_sequence_through_any_permutation(order: list[int], correction: str) -> None:
    torch.manual_seed(2)
    lengths = [1, 3, 2, 4]
    parts = [(-torch.rand(n, dtype=torch.float64), -torch.rand(n, dtype=torch.float64)) for n in lengths]
    config = GroupsConfig(correction=correction, correction_cap=1.2, correction_floor=0.9)

    def weights(index: list[int]) -> list[torch.Tensor]:
        old, sampler = torch.cat([parts[i][0] for i in index]), torch.cat([parts[i][1] for i in index])
        chosen = [lengths[i] for i in index]
        return list(importance_weights(old, sampler, config, chosen)[0].split(chosen))

    plain = weights(list(range(4)))
    for place, number in enumerate(order):
        torch.testing.assert_close(weights(order)[place], plain[number])


def test_weights_carry_no_gradient() -> None:
    old = OLD.clone().requires_grad_()
    assert not importance_weights(old, SAMPLER, GroupsConfig())[0].requires_grad
