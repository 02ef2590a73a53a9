"""The sum over the outputs of a linear layer, which one product with the summed weight gives as well."""

from typing import Any

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x).sum(dim=1)


def get_inputs() -> list[Any]:
    return [torch.randn(2048, 256)]


def get_init_inputs() -> list[Any]:
    return [256, 96]
