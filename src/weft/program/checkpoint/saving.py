"""The state of a program: as whole tensors, in checkpoints, and how it continues from there."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.errors import UserError
from weft.patterns import without_wrappers
from weft.program.agreement import gathered, run_on_all
from weft.program.checkpoint.extras import put_module_states, with_module_states
from weft.program.checkpoint.load import Weights, load, located
from weft.program.checkpoint.manifest import checkpoint_path, put_back
from weft.program.checkpoint.program_state import ProgramState
from weft.program.checkpoint.save import Writing, save
from weft.program.checkpoint.values import about_program
from weft.program.core import ProgramCore, ProgramPart, one_at_a_time
from weft.program.live.ownership import named_variables
from weft.program.live.variables import load_whole, state_dict_names, whole_of
from weft.program.training.states import full_states
from weft.tensor.divergence import note_write


class ProgramSaving(ProgramPart):
    """The state of a program: given and taken as plain tensors, checkpoints."""

    def __init__(self, core: ProgramCore) -> None:
        super().__init__(core)
        self._writing: Writing | None = None

    @one_at_a_time
    def save(
        self,
        path: str | Path,
        extra: Mapping[str, Any] | None = None,
        wait: bool = True,
        replace: bool = False,
    ) -> None:
        """Write a checkpoint: parameters, buffers, optimizer states, FP32 main parameters, loss scale, options of
        groups, steps.

        The results of modules' `get_extra_state()` are written too.

        It is a folder of safetensors files, as `torch.distributed.checkpoint` writes them, which hold each
        tensor once, under the names of a single device ("model.blocks.0.weight",
        "optimizer.state.blocks.0.weight.exp_avg"), and "weft.json" with all that is not a tensor. It appears at `path`
        whole or not at all. Every process must call it.

        Args:
            path: on a file system that all processes see.
            extra: more that `load` returns: numbers, texts, tensors, lists and dicts of them, and objects with
                `state_dict` and `load_state_dict` such as learning-rate schedulers. If they differ between
                processes, each keeps its own; global tensors in them must be the same on all.
            wait: False returns as soon as everything is copied to host memory; a thread writes it. The next
                `save`, `load`, `wait_for_saved` and `close` wait for the thread, and raise its error.
            replace: True replaces a checkpoint at `path` once the new one is complete; else `path` must not exist.

        Raises:
            UserError: on every process, when one cannot write; `parameter.grad` holds gradients; or `extra` holds
                another kind of value.
        """
        place, core = checkpoint_path(path), self._core
        core.make_ready("save")
        state = self._state()
        about = about_program(core.setting, core.steps, core.step.optimizers)
        groups = zlib.crc32(json.dumps(about["groups"]).encode())
        core.enter(f"save {place}, wait={wait}, replace={replace}, options {groups:x}")
        core.training.take()
        self._check_no_gradients("save")
        before, self._writing = self._writing, None
        given = with_module_states(extra, core.setting.model)
        self._writing = save(state, place, about, given, before, wait, replace)

    @one_at_a_time
    def wait_for_saved(self) -> None:
        """Wait until a checkpoint that `save` still writes is there. Every process must call it.

        Raises:
            UserError: on every process, when one could not write.
        """
        self._core.enter("wait for the last checkpoint")
        run_on_all(self.world, "what was written", self._written)

    @one_at_a_time
    def load(
        self,
        path: str | Path | Weights,
        extra: Mapping[str, Any] | None = None,
        model_only: bool = False,
    ) -> dict[str, Any]:
        """Go on from a checkpoint that `save` wrote, in any layout, on any number of ranks.

        Files that `torch.distributed.checkpoint` has written as safetensors are read too, with names as `save` gives
        them or the plain ones of a model's `state_dict()`; states that they lack begin again, or stay. Each
        rank reads its parts. Every process must call it.

        Args:
            path: the folder; or a `weft.Weights` of parameters and buffers alone, under other names, or not all there.
            extra: objects whose `load_state_dict` gets what `save` had under the same name; where they hold global
                tensors, in the layouts of those.
            model_only: True reads parameters and buffers, and leaves optimizers, steps and extras as they are.

        Returns:
            The `extra` that `save` was given, by this process if they differ.

        Raises:
            UserError: on every process, before anything is written: there is no checkpoint, a file is damaged or
                missing, it is of another model, optimizer or seed, or extras differ and were saved by another number
                of processes.
        """
        weights, place = located(path)
        model_only = model_only or isinstance(path, Weights)
        core, world = self._core, self.world
        core.check_open("load")
        core.enter(f"load {place}" + (", model_only=True" if model_only else ""))

        def settle() -> None:
            self._written()
            if self.is_first:
                put_back(place)

        run_on_all(world, "the last checkpoint", settle)
        if core.failed is None:
            self._check_no_gradients("load")
        about, extras = load(self._state(), weights, core.step.optimizers, extra or {}, model_only)
        own, model = dict(extras), core.setting.model
        run_on_all(world, "modules", lambda: put_module_states(own, model))
        core.steps = int(about.get("steps", core.steps))
        core.note_loaded()
        return own

    @one_at_a_time
    def full_state_dict(self, masters: bool = False) -> dict[str, Tensor]:
        """Whole copies of all parameters and buffers, under the names of the model's `state_dict()`.

        Every process must call it. The tensors are on the placement's device, the same on every
        rank.

        Args:
            masters: give the FP32 main parameters of each parameter that has one, in place of what it is
                when rounded, so that `load_full_state_dict` continues exactly there.
        """
        core, model = self._core, self._core.setting.model
        core.enter("full_state_dict of FP32 main parameters" if masters else "full_state_dict")
        # A process that does not call it is told of here, also where no tensor needs an exchange.
        names = run_on_all(core.setting.world, "names", lambda: state_dict_names(model))
        variables = named_variables(model)
        whole = {key: whole_of(variables[key]) for key in dict.fromkeys(names.values())}
        if masters:  # which are what users have written to their parameters
            core.training.take()
            whole |= core.training.masters.whole(variables)
        return {name: whole[key] for name, key in names.items()}

    @one_at_a_time
    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Set parameters and buffers from whole tensors, as `full_state_dict` gives them.

        FP32 main parameters get the values, parameters the rounded values.

        Raises:
            UserError: naming the entries that are missing, unknown, or of another shape.
        """
        setting = self._core.setting
        self._core.enter("load_full_state_dict")
        if isinstance(state, Mapping):
            state = {without_wrappers(str(name)): each for name, each in state.items()}
        load_whole(setting, self._core.compiled.graph, state)
        self._core.training.masters.fill_waiting(
            {key: state[name] for name, key in state_dict_names(setting.model).items()}
        )
        if setting.world.several:
            note_write(setting.placement, "load_full_state_dict", state.values())
        self._core.note_loaded()

    @one_at_a_time
    def full_optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer | None = None
    ) -> dict[str, Any]:
        """`optimizer.state_dict()` with whole, plain copies of all states, on every process, which all must call it.

        `load_state_dict` takes it: of this optimizer, compiled or released, and of one on a single
        device.

        Args:
            optimizer: which of several; by default the only one.

        Raises:
            UserError: when the program was compiled without that optimizer, or with several and none
                is named.
        """
        core, found = self._core, self._core.step.optimizers.each
        if optimizer is None and len(found) == 1:
            (optimizer,) = found
        if not any(optimizer is one for one in found):
            raise UserError(
                f"full_optimizer_state_dict: the program has {len(found)} optimizers; name one of them, "
                "full_optimizer_state_dict(optimizer)"
            )
        assert optimizer is not None  # it is one of those
        core.enter("full_optimizer_state_dict")
        core.training.take()
        return full_states(optimizer)

    @property
    def is_first(self) -> bool:
        """True in the process that writes for all: that of rank 0."""
        return 0 in self.world.ranks

    @property
    def exchange(self) -> Callable[[str], list[str]] | None:
        """Gives the texts of all processes, given this one's, which all must call; None if it is the only one."""
        return self._exchange if self._core.setting.world.several else None

    @one_at_a_time
    def _exchange(self, text: str) -> list[str]:
        self._core.enter("exchange")
        return gathered(self.world, "texts", lambda: text)

    def _state(self) -> ProgramState:
        core = self._core
        return ProgramState(core.setting, core.compiled.graph, core.training)

    def _check_no_gradients(self, call: str) -> None:
        if self._core.training.gradients.standing():
            raise UserError(
                f"program.{call}: parameter.grad holds gradients, which a checkpoint cannot hold; call "
                "program.update() or model.zero_grad() first"
            )

    def _written(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.wait()
