"""ReLU of a linear layer."""

from typing import Any

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.fc(x))


def get_inputs() -> list[Any]:
    return [torch.randn(512, 384)]


def get_init_inputs() -> list[Any]:
    return [384]
