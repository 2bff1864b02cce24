"""A strategy of PyTorch Lightning whose steps weft compiles: put this file beside your script.

    from weft_strategy import WeftStrategy
    Trainer(accelerator="cpu", devices=1, strategy=WeftStrategy())

It is one of `pytorch_lightning` or `lightning.pytorch`, whichever the script has imported before. The loop stays the
Trainer's: its loaders, schedules, callbacks, loggers and checkpoints. `training_step`, backward and update are one
compiled step on all ranks, which `weft run` or torchrun has started; every process has the whole batch.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from importlib import import_module
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

import weft
from weft.errors import UserError

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

# One library under two names: a Trainer takes strategies of its own name alone.
_LIGHTNING = "lightning.pytorch" if "lightning.pytorch" in sys.modules else "pytorch_lightning"
_module_class: Any = import_module(_LIGHTNING).LightningModule
_strategy_class: Any = import_module(f"{_LIGHTNING}.strategies").SingleDeviceStrategy
_is_parameter: Any = import_module(
    f"{_LIGHTNING}.utilities.signature_utils"
).is_param_in_hook_signature
# What a compiled step has no place for.
_HOOKS = (
    "backward",
    "configure_gradient_clipping",
    "on_after_backward",
    "on_before_backward",
    "on_before_optimizer_step",
    "optimizer_step",
    "optimizer_zero_grad",
)
# Before the names of results that `training_step` has logged.
_LOG = "log "
# What it logs while it is captured, and with which options. No attributes: capture puts back what a step writes there.
_values: ContextVar[dict[str, Any]] = ContextVar("values")
_options: ContextVar[dict[str, dict[str, Any]]] = ContextVar("options")


class WeftStrategy(_strategy_class):  # type: ignore[misc, unused-ignore]
    """Steps on all ranks of the job.

    What `training_step` logs are tensors of the step; its argument `batch_idx` is None. After `fit` the module is
    ordinary again, the same on every process: validate it then.

    Args:
        layout: how the step lies on the ranks; data parallel without one.
        device: "cpu", or the device of this process.

    Raises:
        UserError: for what the compiled step does not have; says what to give instead.
    """

    strategy_name = "weft"

    def __init__(self, layout: weft.Strategy | None = None, device: Any = "cpu") -> None:
        super().__init__(device)
        self.global_rank = int(os.environ.get("RANK", "0"))
        self._layout = layout
        self._program: weft.Program | None = None

    @property
    def is_global_zero(self) -> bool:
        """True in the process that writes logs and checkpoints."""
        return self.global_rank == 0

    def setup(self, trainer: Trainer) -> None:
        """Refuse what the step does not have, and have `self.log` heard."""
        super().setup(trainer)
        if trainer.state.fn == "fit":
            for found, instead in _unsupported(trainer, len(self.optimizers)):
                raise UserError(f"WeftStrategy: {found} cannot be in a compiled step; {instead}")
            self._module.log = MethodType(_log, self._module)
            _options.set({})

    def training_step(self, batch: Any, *_: Any) -> Any:
        """One step with its update; what it logs goes to the Trainer."""
        module = self._module
        if self._program is None:
            ranks = range(int(os.environ.get("WORLD_SIZE", "1")))
            place = weft.placement(self.root_device.type, ranks)
            self._program = weft.compile(
                module, _step, self.optimizers[0], batch, placement=place, strategy=self._layout
            )
        found = self._program.step(batch)
        own = {name: _apart(x) for name, x in found.items() if not name.startswith(_LOG)}
        for name in found.keys() - own.keys():
            title = name.removeprefix(_LOG)
            _module_class.log(module, title, _apart(found[name]), **_options.get()[title])
        return own["loss"] if set(own) == {"loss"} else own

    def backward(self, closure_loss: Tensor, *_: Any, **__: Any) -> Tensor:
        """Nothing: it is a part of the step."""
        return closure_loss

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **_: Any
    ) -> Any:
        """Run the step, which updates."""
        return closure()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's state, whole, on every process."""
        if self._program is None:
            return super().lightning_module_state_dict()
        return self._program.full_state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The optimizer's state, whole, on every process."""
        if self._program is None:
            return super().optimizer_state(optimizer)
        return self._program.full_optimizer_state_dict()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """What process `src` has, on all, once they have met."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return obj
        held = [obj]
        dist.broadcast_object_list(held, src)
        return held[0]

    def barrier(self, *_: Any, **__: Any) -> None:
        """Wait for all processes, once they have met."""
        if dist.is_initialized():
            dist.barrier()

    def teardown(self) -> None:
        """Make the module and the optimizer ordinary again."""
        program, self._program = self._program, None
        if program is not None:
            program.close()
            weft.release(self._module, self.optimizers[0])
        vars(self._module).pop("log", None)
        super().teardown()

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module


def _log(module: LightningModule, *given: Any, **options: Any) -> None:
    """Stands for `self.log`: in a step that is captured it is heard, elsewhere it logs."""
    heard = _values.get(None)
    if heard is None:
        _module_class.log(module, *given, **options)
        return
    said = inspect.signature(_module_class.log).bind(module, *given, **options).arguments
    said.pop("self")
    name, value = said.pop("name"), said.pop("value")
    heard[name], _options.get()[name] = value, said


def _apart(found: Any) -> Any:
    """What a step has returned, without its graph."""
    return found.detach() if isinstance(found, Tensor) else found


def _step(module: Any, batch: Any) -> dict[str, Any]:
    """The loss of `training_step`, with what else it returns and what it logs."""
    numbered = _is_parameter(module.training_step, "batch_idx", min_args=2)
    token = _values.set({})
    try:
        found = module.training_step(batch, *([None] if numbered else []))
        logged = {_LOG + name: value for name, value in _values.get().items()}
    finally:
        _values.reset(token)
    return {**(found if isinstance(found, Mapping) else {"loss": found}), **logged}


def _unsupported(trainer: Trainer, optimizers: int) -> list[tuple[str, str]]:
    """What is set and cannot be, with what to give instead."""
    module = trainer.lightning_module
    overridden = [
        name for name in _HOOKS if getattr(type(module), name) is not getattr(_module_class, name)
    ]
    checks = [
        (trainer.accumulate_grad_batches != 1, "accumulate_grad_batches", "micro_batches="),
        (bool(trainer.gradient_clip_val), "gradient_clip_val", "clip_norm="),
        (trainer.precision != "32-true", f"precision={trainer.precision!r}", "precision="),
    ]
    found = [
        (name, f"give WeftStrategy(weft.Strategy({option}…))")
        for bad, name, option in checks
        if bad
    ]
    if not module.automatic_optimization:
        found.append(("manual optimization", "call weft.compile and program.step yourself"))
    if optimizers != 1:
        found.append((f"a module with {optimizers} optimizers", "return one of all parameters"))
    if overridden:
        found.append((f"the module's own {', '.join(overridden)}", "leave it to the step"))
    if trainer.enable_validation:
        found.append(
            ("validation while training", "give limit_val_batches=0, and validate after fit")
        )
    return found
