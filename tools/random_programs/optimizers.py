"""Optimizers of random programs, with random hyperparameters and groups.

Each eps is large: some gradients are zero but for rounding, and Adam would divide them by themselves.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

DECAY = ("0.0", "0.0", "0.1", "0.01")


@dataclass(frozen=True)
class Kind:
    """A class of `torch.optim`: what its arguments may be, and how often it is drawn."""

    arguments: Mapping[str, tuple[str, ...]]
    weight: float = 1.0


OPTIMIZERS: Mapping[str, Kind] = {
    "SGD": Kind(
        {
            "lr": ("0.1", "0.01"),
            "momentum": ("0.0", "0.9"),
            "weight_decay": DECAY,
            "maximize": ("False", "False", "True"),
        },
        4,
    ),
    "Adam": Kind(
        {
            "lr": ("1e-2", "1e-3"),
            "betas": ("(0.9, 0.99)", "(0.5, 0.9)"),
            "eps": ("1e-2",),
            "weight_decay": DECAY,
            "amsgrad": ("False", "True"),
        },
        3,
    ),
    "AdamW": Kind(
        {
            "lr": ("1e-2", "1e-3"),
            "eps": ("1e-2",),
            "weight_decay": DECAY,
            "foreach": ("None", "True", "False"),
        },
        4,
    ),
    "Adagrad": Kind(
        {"lr": ("1e-2",), "eps": ("1e-2",), "lr_decay": ("0", "0.1"), "weight_decay": DECAY}
    ),
    "RMSprop": Kind(
        {
            "lr": ("1e-2",),
            "eps": ("1e-1",),
            "momentum": ("0", "0.9"),
            "centered": ("False", "True"),
            "weight_decay": DECAY,
        }
    ),
    "Adadelta": Kind({"lr": ("1.0",), "eps": ("1e-2",), "weight_decay": DECAY}),
    "Adamax": Kind({"lr": ("1e-2",), "eps": ("1e-2",), "weight_decay": DECAY}),
    "NAdam": Kind({"lr": ("1e-2",), "eps": ("1e-2",), "decoupled_weight_decay": ("False", "True")}),
    "RAdam": Kind({"lr": ("1e-2",), "eps": ("1e-2",), "weight_decay": DECAY}),
    "ASGD": Kind({"lr": ("1e-2",), "t0": ("0", "1e6"), "weight_decay": DECAY}, 0.3),
    "Adafactor": Kind({"lr": ("1e-2",), "weight_decay": DECAY}, 0.2),
    "Rprop": Kind({"lr": ("1e-2",)}, 0.2),
}


def optimizer_text(name: str, rng: random.Random) -> str:
    """The function that makes the optimizer of a model."""
    kind = OPTIMIZERS[name]
    chosen = {key: rng.choice(values) for key, values in kind.arguments.items()}
    if name == "SGD" and chosen["momentum"] == "0.9" and rng.random() < 0.4:
        chosen["nesterov"] = "True"
    if rng.random() < 0.1 and name in ("SGD", "Adam", "AdamW"):
        chosen.pop("foreach", None)
        chosen["fused"] = "True"
    given = ", ".join(f"{key}={value}" for key, value in chosen.items())
    groups = rng.choice(
        [
            "trained",
            "trained",
            "model.parameters()",
            '[{"params": trained[::2], "lr": 5e-3}, {"params": trained[1::2]}]',
            "list(model.named_parameters())",
            _DECAYED if "weight_decay" in kind.arguments else "trained",
        ]
    )
    if rng.random() < 0.05:
        groups = "trained[:-1] or trained"
    made = f"torch.optim.{name}({groups}, {given})"
    if rng.random() < 0.1:
        one = f"torch.optim.{name}(trained[::2], {given})"
        two = "[torch.optim.SGD(trained[1::2], lr=0.05)] if len(trained) > 1 else []"
        made = f"[{one}] + ({two})"
    return f"""def make_optimizer(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    return {made}
"""


_DECAYED = """[
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]"""
