"""The Trainer of transformers, with steps of weft's: put this file beside your script.

    from weft_trainer import WeftTrainer as Trainer

The loop stays the Trainer's: its arguments, data, schedules, callbacks and logs. Forward, backward, clipping and update
are one compiled step on all ranks, which `weft run` or torchrun has started.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import weft
from weft.errors import UserError

# Arguments of the Trainer, what each must be here, and what does it instead.
_FIXED: dict[str, tuple[Any, str]] = {
    "gradient_accumulation_steps": (1, "give weft.Strategy(micro_batches=)"),
    "label_smoothing_factor": (0.0, "smooth in the loss of the model"),
    "eval_strategy": ("no", "call evaluate() after train()"),
    "save_strategy": ("no", "call save_model() after train()"),
    "bf16": (False, 'give weft.Strategy(precision="bf16")'),
    "fp16": (False, 'give weft.Strategy(precision="fp16")'),
    "fsdp": ([], "give weft.Strategy(zero=weft.Zero(3))"),
    "deepspeed": (None, "give weft.Strategy(zero=)"),
    "torch_compile": (False, 'weft.compile has kernels="inductor"'),
    "auto_find_batch_size": (False, "set per_device_train_batch_size"),
}
# The tokens of a batch, of all processes, by which models divide their loss; the Trainer counts them.
_COUNT = "num_items_in_batch"


class WeftTrainer(transformers.Trainer):  # type: ignore[misc, unused-ignore]
    """A Trainer whose steps weft compiles.

    After `train` the model is ordinary again, the same on every process: evaluate and save it then.

    Args:
        strategy: how the step lies on the ranks; data parallel without one. Of the batch every process brings rows of
            its own, as many as `per_device_train_batch_size`; where ranks share rows, as in tensor parallel or stages,
            they are gathered first.
        shapes: lengths to which batches are padded, for a collator that pads to the longest row of its process.

    Raises:
        UserError: for what the compiled step does not have; says what to give instead.
    """

    def __init__(
        self,
        *args: Any,
        strategy: weft.Strategy | None = None,
        shapes: weft.Buckets | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        for name, (must, instead) in _FIXED.items():
            given = getattr(self.args, name, must)
            found = getattr(given, "value", given)
            if found and found != must:
                raise UserError(
                    f"WeftTrainer: {name}={must!r} is expected, found {found!r}; {instead}"
                )
        if not self.args.average_tokens_across_devices:
            raise UserError(
                "WeftTrainer: average_tokens_across_devices=True is expected, found False; a step's loss is that of "
                "the batch of all processes"
            )
        own = type(self).compute_loss is not transformers.Trainer.compute_loss
        if own or self.compute_loss_func is not None:
            raise UserError(
                "WeftTrainer: the loss is the one that the model returns for `labels`, found a loss of the Trainer's; "
                "compute it in the model's forward"
            )
        chosen = strategy or weft.Strategy()
        if not chosen.batch:
            chosen = replace(chosen, batch={"*": weft.split(0)})
        if chosen.clip_norm is None and self.args.max_grad_norm:
            chosen = replace(chosen, clip_norm=self.args.max_grad_norm)
        self._strategy, self._shapes = chosen, shapes
        self._program: weft.Program | None = None
        # The model is weft's to distribute: nothing is wrapped.
        self.accelerator.prepare_model = lambda model, **_: model

    def train(
        self,
        resume_from_checkpoint: Any = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train; at the end the model and the optimizer are ordinary again."""
        if resume_from_checkpoint:
            raise UserError(
                "WeftTrainer: resume_from_checkpoint is not there; load the weights into the model before train()"
            )
        try:
            return super().train(None, trial, ignore_keys_for_eval)
        finally:
            program, self._program = self._program, None
            if program is not None:
                program.close()
                weft.release(self._module, self._bare_optimizer())

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """One step with its update; gives the mean loss over the batch of all processes."""
        batch, strategy = self._alike(dict(self._prepare_inputs(inputs))), self._strategy
        local = _is_by_rows(strategy)
        if not local:
            batch = self.accelerator.gather(batch)
        if num_items_in_batch is not None:
            batch[_COUNT] = torch.as_tensor(num_items_in_batch)
            strategy = replace(strategy, batch={_COUNT: weft.broadcast, **strategy.batch})
        if self._program is None:
            ranks = range(int(os.environ.get("WORLD_SIZE", "1")))
            self._program = weft.compile(
                self._module,
                _loss,
                self._bare_optimizer(),
                batch,
                placement=weft.placement(self.args.device.type, ranks),
                strategy=strategy,
                batch="local" if local else "whole",
                shapes=self._shapes,
                metrics=["grad_norm"],
            )
        return self._program.step(batch).detach()

    def _alike(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The rows of this process, as long as those of the others."""
        if self._shapes is None:
            return batch
        own = self._shapes.sizes_of(batch)
        every = self.accelerator.gather(torch.tensor([[*own.values()]], device=self.args.device))
        longest = dict(zip(own, every.amax(0).tolist(), strict=True))
        return dict(self._shapes.padded(batch, longest))

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        """The norm of the step's gradients: they were clipped before its update."""
        assert self._program is not None
        return self._program.metrics["grad_norm"]

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self._clip_grad_norm(model) if grad_norm is None else grad_norm

    @property
    def _module(self) -> nn.Module:
        assert self.model is not None
        return self.model

    def _bare_optimizer(self) -> Any:
        """The optimizer without the wrapper of accelerate."""
        return getattr(self.optimizer, "optimizer", self.optimizer)


def _is_by_rows(strategy: weft.Strategy) -> bool:
    """True where every rank takes rows of its own, and all of the step."""
    split = weft.split(0)
    return not strategy.stages and all(
        set(sbps if isinstance(sbps, tuple) else (sbps,)) == {split}
        for sbps in strategy.batch.values()
    )


def _loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    loss = model(**batch).loss
    if loss is None:
        raise UserError(
            f"WeftTrainer: the model gives no loss for {', '.join(batch)}; add what it takes it from, such as labels"
        )
    return loss
