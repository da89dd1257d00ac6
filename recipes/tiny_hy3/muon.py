"""Muon: momentum, orthogonalised, for the matrices inside the network.

Source: Keller Jordan, https://kellerjordan.github.io/posts/muon/ (the quintic's coefficients and
the scale by shape are his).
"""

from collections.abc import Iterable

import torch
from torch import nn

_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonalize(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """[..., R, C]: roughly U V^T of each matrix's U S V^T, by Newton-Schulz in bf16."""
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """A group is one parameter and `rows`: the sizes of the matrices stacked along its rows.

    Query, key and value, and gate and up, are stored as one but are orthogonalised apart; leading
    dimensions (experts) are matrices of their own.
    """

    def __init__(
        self,
        matrices: Iterable[tuple[nn.Parameter, tuple[int, ...]]],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
    ) -> None:
        groups = [{"params": [p], "rows": rows} for p, rows in matrices]
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (parameter,) = group["params"]
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(parameter)
            momentum = state["momentum"].mul_(group["momentum"]).add_(parameter.grad)
            update = parameter.grad.add(momentum, alpha=group["momentum"])
            lr = group["lr"]
            parameter.mul_(1 - lr * group["weight_decay"])
            views = zip(
                parameter.split(group["rows"], dim=-2),
                update.split(group["rows"], dim=-2),
                strict=True,
            )
            for weight, change in views:
                scale = max(1.0, weight.shape[-2] / weight.shape[-1]) ** 0.5
                weight.add_(orthogonalize(change).float(), alpha=-lr * scale)
