"""Draws of a module's state: random values for all parameters and buffers, in sane ranges.

Invariants: integer and bool entries, and floating masks among the buffers, stay as they are; what is positive (running
variances, scales of ones) is drawn positive; a draw follows from its seed alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from evaluator.reference.subject import Subject

Style = Literal["near", "unit", "exact"]
"""`near`: the spread that construction gave; `unit`: constants become values of order one; `exact`: small integers."""


def draw_state(module: torch.nn.Module, seed: int, style: Style = "near") -> dict[str, torch.Tensor]:
    """A whole state dict of random values on the module's device, for `load_state_dict`."""
    device = next((value.device for value in module.state_dict().values()), torch.device("cpu"))
    generator = torch.Generator(device).manual_seed(seed % (1 << 63))
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return {
        name: _draw(value.detach(), generator, style, is_parameter=name in parameters)
        for name, value in module.state_dict().items()
    }


def _draw(value: torch.Tensor, generator: torch.Generator, style: Style, *, is_parameter: bool) -> torch.Tensor:
    if not value.is_floating_point() or value.numel() == 0 or not bool(torch.isfinite(value).all()):
        return value.clone()
    if not is_parameter and _is_mask(value):
        return value.clone()
    if style == "exact":
        return torch.randint(-1, 2, value.shape, generator=generator, device=value.device).to(value.dtype)
    return _like(value.double(), generator, style).to(value.dtype)


def _like(value: torch.Tensor, generator: torch.Generator, style: Style) -> torch.Tensor:
    constant = value.numel() == 1 or bool((value == value.flatten()[0]).all())
    uniform = torch.rand(value.shape, generator=generator, dtype=torch.float64, device=value.device)
    normal = torch.randn(value.shape, generator=generator, dtype=torch.float64, device=value.device)
    if constant:
        centre = float(value.flatten()[0])
        if centre == 0:
            return 0.5 * normal
        if style == "unit" and abs(centre) != 1:
            return normal if centre < 0 else 0.1 + uniform
        return centre * (0.5 + uniform)
    if bool((value > 0).all()):
        return value.mean() * (0.5 + uniform)
    return value.mean() + value.std() * normal


def _is_mask(value: torch.Tensor) -> bool:
    """Whether a buffer holds at most two values, zero among them, and both of them: a causal mask, for instance."""
    values = torch.unique(value)
    return values.numel() == 2 and bool((values == 0).any())


def usable_state(
    subject: Subject, seed: int, style: Style = "near", inputs: Sequence[Any] | None = None
) -> dict[str, torch.Tensor] | None:
    """A drawn state with which the reference stays finite, trying the style, then `near`; None where neither does."""
    if inputs is None:
        inputs = subject.draw(seed)
    styles: tuple[Style, ...] = (style,) if style == "near" else (style, "near")
    for chosen in styles:
        state = draw_state(subject.module, seed, chosen)
        try:
            outputs = subject.run(inputs, state)
        except (RuntimeError, ValueError):
            continue
        if subject.stays_finite(outputs, inputs):
            return state
    return None
