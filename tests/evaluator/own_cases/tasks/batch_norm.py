"""Batch normalisation in training mode: the running statistics are a result as well."""

from typing import Any

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


def get_inputs() -> list[Any]:
    return [torch.randn(1024, 512)]


def get_init_inputs() -> list[Any]:
    return [512]
