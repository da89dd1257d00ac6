"""Trainer: one run's model, optimizers and position; a step at a time."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from recipes.tiny_hy3.model import TrainingModel, losses
from recipes.tiny_hy3.muon import Muon
from recipes.tiny_hy3.schedule import Schedule
from recipes.tiny_hy3.windows import Windows
from torch import nn

from moestro.core.model_spec import ModelSpec

_MTP_WEIGHT = 0.3
_MUON_LR_RATIO = 10 / 3
"""Muon's rate over AdamW's."""
_CLIP = 1.0


@dataclass(frozen=True, slots=True)
class StepReport:
    step: int
    seen_tokens: int
    length: int
    lr: float
    loss: float
    mtp_loss: float
    grad_norm: float
    max_load: float


class Trainer:
    """Model, optimizers and position of one run."""

    def __init__(
        self,
        spec: ModelSpec,
        windows: Windows,
        schedule: Schedule,
        lr: float,
        precision: torch.dtype = torch.bfloat16,
    ) -> None:
        torch.manual_seed(windows.seed)
        self.model = TrainingModel(spec)
        self.windows = windows
        self.schedule = schedule
        self.lr = lr
        self.precision = precision
        inside = dict(_inside_matrices(self.model, spec))
        matrices = [(p, inside[n]) for n, p in self.model.named_parameters() if n in inside]
        rest = [p for n, p in self.model.named_parameters() if n not in inside]
        self.muon = Muon(matrices, lr * _MUON_LR_RATIO)
        self.adamw = torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.step = 0
        self.seen_tokens = 0

    def train_step(self) -> StepReport:
        """One batch, one update of everything."""
        seen = self.seen_tokens
        sequences, length = self.schedule.batch_shape(seen)
        lr = self.lr * self.schedule.lr_factor(seen)
        for optimizer, rate in ((self.adamw, lr), (self.muon, lr * _MUON_LR_RATIO)):
            for group in optimizer.param_groups:
                group["lr"] = rate
        ids = self.windows.batch(self.step, sequences, length)
        with torch.autocast("cpu", self.precision, enabled=self.precision != torch.float32):
            loss, mtp_loss = losses(self.model, ids)
        (loss + _MTP_WEIGHT * mtp_loss).backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), _CLIP, error_if_nonfinite=True)
        for step_optimizer in (self.adamw, self.muon):
            step_optimizer.step()
            step_optimizer.zero_grad(set_to_none=True)
        max_load = self._balance(self.schedule.balance_rate(seen))
        self.step += 1
        self.seen_tokens += sequences * length
        return StepReport(
            self.step, self.seen_tokens, length, lr, loss.item(), mtp_loss.item(),
            norm.item(), max_load,
        )  # fmt: skip

    def _balance(self, rate: float) -> float:
        """Push each expert's bias towards even load; returns the largest share seen."""
        largest = 0.0
        for layer in self.model.moe_layers():
            even = 1 / len(layer.last_load)
            layer.expert_bias += rate * torch.sign(even - layer.last_load)
            largest = max(largest, layer.last_load.max().item())
        return largest

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "muon": self.muon.state_dict(),
            "adamw": self.adamw.state_dict(),
            "step": self.step,
            "seen_tokens": self.seen_tokens,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.muon.load_state_dict(state["muon"])
        self.adamw.load_state_dict(state["adamw"])
        self.step, self.seen_tokens = state["step"], state["seen_tokens"]


def _inside_matrices(
    model: TrainingModel, spec: ModelSpec
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Muon's parameters: (name, sizes of the matrices stacked along the rows)."""
    q, kv = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
    for name, parameter in model.named_parameters():
        rows = parameter.shape[-2] if parameter.dim() > 1 else 0
        if not rows or "embed_tokens" in name or "lm_head" in name or "mlp.gate." in name:
            continue
        if "qkv_proj" in name:
            yield name, (q, kv, kv)
        elif "gate_up_proj" in name:
            yield name, (rows // 2, rows // 2)
        else:
            yield name, (rows,)
