"""Modules of PyTorch that the tests of imports share."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="models are imported from PyTorch")


class Called(torch.nn.Module):
    """A function of tensors as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: Any) -> Any:
        return self.function(*given)
