"""Random parameters: everything changes that a candidate must track, nothing that it may rely on."""

from __future__ import annotations

import torch

from evaluator.reference.parameters import draw_state, usable_state
from evaluator.reference.subject import Subject


class Many(torch.nn.Module):
    """Parameters and buffers of every sort."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(64, 32)
        self.norm = torch.nn.BatchNorm1d(32)
        self.floor = torch.nn.Parameter(torch.full((1, 32), -100.0))
        self.register_buffer("causal", torch.ones(32, 32).tril())
        self.register_buffer("index", torch.arange(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.maximum(self.norm(self.linear(x)), self.floor)


def test_every_floating_entry_changes_and_masks_and_integers_stay() -> None:
    module = Many()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    for style in ("near", "unit"):
        drawn = draw_state(module, 3, style)  # type: ignore[arg-type]
        same = {name for name, value in drawn.items() if torch.equal(value, before[name])}
        assert same == {"causal", "index", "norm.num_batches_tracked"}
        assert all(
            value.dtype == before[name].dtype and value.shape == before[name].shape for name, value in drawn.items()
        )


def test_what_is_positive_stays_positive() -> None:
    for seed in range(20):
        for style in ("near", "unit"):
            drawn = draw_state(Many(), seed, style)  # type: ignore[arg-type]
            assert bool((drawn["norm.running_var"] > 0.4).all())
            assert bool((drawn["norm.weight"] > 0.4).all())


def test_weights_keep_their_spread() -> None:
    module = Many()
    drawn = draw_state(module, 1)
    assert 0.8 < float(drawn["linear.weight"].std() / module.linear.weight.detach().std()) < 1.25


def test_unit_brings_far_constants_into_reach() -> None:
    """A clamp at -100 never binds near its construction; drawn of order one it does."""
    assert bool((draw_state(Many(), 1, "near")["floor"] < -40).all())
    assert float(draw_state(Many(), 1, "unit")["floor"].abs().mean()) < 2


def test_exact_states_are_small_integers() -> None:
    drawn = draw_state(Many(), 1, "exact")
    assert set(drawn["linear.weight"].unique().tolist()) == {-1.0, 0.0, 1.0}


def test_a_draw_follows_from_its_seed() -> None:
    module = Many()
    first, again, other = (draw_state(module, seed)["linear.weight"] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_an_unusable_style_falls_back_and_none_where_nothing_works() -> None:
    class Picky(torch.nn.Module):
        def __init__(self, limit: float) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.full((4,), -50.0))
            self.limit = limit

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.log(self.limit - self.scale)

    def inputs() -> list[torch.Tensor]:
        return [torch.randn(3, 4)]

    near = usable_state(Subject(Picky(-10.0), inputs), 1, "unit")
    assert near is not None
    assert bool((near["scale"] < -20).all())
    assert usable_state(Subject(Picky(-60.0), inputs), 1) is not None
    assert usable_state(Subject(Picky(-1000.0), inputs), 1) is not None, "the reference is NaN by itself"


def test_running_the_reference_leaves_its_state_alone() -> None:
    module = Many().train()
    subject = Subject(module, lambda: [torch.randn(8, 64)])
    before = {name: value.clone() for name, value in module.state_dict().items()}
    inputs = subject.draw(1)
    given = inputs[0].clone()
    subject.run(inputs, draw_state(module, 5))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(inputs[0], given)
