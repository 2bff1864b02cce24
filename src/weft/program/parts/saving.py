"""Checkpoints and snapshots of a program: what it saves, and how it goes on from there."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from weft.errors import UserError
from weft.program.agreement import agreed, told
from weft.program.one_thread import one_at_a_time
from weft.program.parts.core import ProgramCore, ProgramPart
from weft.program.saving.claims import claim
from weft.program.saving.groups import about_program
from weft.program.saving.load import load
from weft.program.saving.manifest import Manifest, checkpoint_path, put_back
from weft.program.saving.memory.generations import shelf_of
from weft.program.saving.memory.snapshots import Snapshots
from weft.program.saving.program_state import ProgramState
from weft.program.saving.save import save
from weft.program.saving.saved_tensors import put_module_states, with_module_states
from weft.program.saving.weights import Weights, located
from weft.program.saving.writing import Writing


class ProgramSaving(ProgramPart):
    """The checkpoints and snapshots of a program."""

    def __init__(self, core: ProgramCore) -> None:
        super().__init__(core)
        # By the folder of the checkpoints that they belong to.
        self._snapshots: dict[Path, Snapshots] = {}
        self._writing: Writing | None = None

    @one_at_a_time
    def save(
        self,
        path: str | Path,
        extra: Mapping[str, Any] | None = None,
        wait: bool = True,
        replace: bool = False,
    ) -> None:
        """Write a checkpoint: parameters, buffers, optimizer states, masters, loss scale, options of groups, steps.

        And what modules give by `get_extra_state()`.

        It is a folder of safetensors files, as `torch.distributed.checkpoint` writes them, in which each tensor
        stands once, under the names that a single device has ("model.blocks.0.weight",
        "optimizer.state.blocks.0.weight.exp_avg"), and "weft.json" with all that is no tensor. It appears at `path`
        whole or not at all. Every process must call it.

        Args:
            path: on a file system that all processes see.
            extra: more that `load` gives back: numbers, texts, tensors, lists and dicts of them, and objects with
                `state_dict` and `load_state_dict` such as learning-rate schedulers. Where they differ between
                processes, each keeps its own; global tensors in them must be the same on all.
            wait: False goes on as soon as all is copied to host memory; a thread writes meanwhile. The next `save`,
                `load`, `wait_for_saved` and `close` wait for it, and raise what has failed.
            replace: True puts it in the place of what is at `path`, once it is whole; else nothing may be there.

        Raises:
            UserError: on every process, when one cannot write; gradients wait for an update; or `extra` holds something
                else.
        """
        place = checkpoint_path(path)
        self._core.make_ready("save")
        state, about = self._to_save("save", f"save {place}")
        before, self._writing = self._writing, None
        given = with_module_states(extra, self._core.setting.model)
        self._writing = save(state, place, about, given, before, wait, replace)

    @one_at_a_time
    def wait_for_saved(self) -> None:
        """Wait until a checkpoint that `save` still writes is there. Every process must call it.

        Raises:
            UserError: on every process, when one could not write.
        """
        self._core.enter("wait for the last checkpoint")
        agreed(self.world, "what was written", self._written)

    @one_at_a_time
    def load(
        self,
        path: str | Path | Weights,
        extra: Mapping[str, Any] | None = None,
        model_only: bool = False,
    ) -> dict[str, Any]:
        """Go on from a checkpoint that `save` wrote, in any layout, on any number of ranks.

        Files that `torch.distributed.checkpoint` has written as safetensors are read too, with names as `save` gives
        them or the plain ones of a model's `state_dict()`; states that they lack begin anew, or stay. Each rank reads
        what it holds. Every process must call it.

        Args:
            path: the folder; or a `weft.Weights` of parameters and buffers alone, under other names, or not all there.
            extra: objects whose `load_state_dict` gets what `save` had under the same name; where they hold global
                tensors, in the layouts of those.
            model_only: True reads parameters and buffers, and leaves optimizers, steps and extras as they are.

        Returns:
            What `save` was given as `extra`, by this process where they differ.

        Raises:
            UserError: on every process, before anything is written: there is no checkpoint, a file is damaged or
                missing, it is of another model, optimizer or seed, or extras differ and were saved by another number
                of processes.
        """
        weights, place = located(path)
        model_only = model_only or isinstance(path, Weights)
        self._core.check_open("load")
        self._core.enter(f"load {place}")
        world = self.world
        first = 0 in world.ranks
        agreed(world, "the last checkpoint", self._written)
        agreed(world, "its place", lambda: put_back(place) if first else None)
        return self._load(weights, extra or {}, model_only)

    @one_at_a_time
    def save_in_memory(self, path: str | Path, extra: Mapping[str, Any] | None = None) -> None:
        """Take a snapshot: copy what a checkpoint holds into memory of this host, and of another one.

        It lies in files of a memory file system that outlive the processes (`weft run` gives them a folder), two
        generations of it. The call waits until the snapshot before is whole, and for a copy of what this process
        saves; a thread sends it to another host. Every process must call it. Where there is no room a warning says so,
        once, and there are none.

        Args:
            path: the folder of the checkpoints that it belongs to.
            extra: as `save` takes it.

        Raises:
            UserError: on every process, when there is no folder for snapshots; and as `save` does.
        """
        place = checkpoint_path(path)
        claim(place, self)
        self._core.make_ready("save")
        state, about = self._to_save("save_in_memory", f"save {place} in memory")
        given = with_module_states(extra, self._core.setting.model)
        self._snapshots_of(place).take(state, self._core.steps, about, given)

    @one_at_a_time
    def wait_for_memory(self) -> None:
        """Wait until the last snapshot is whole, here and on the other hosts. Every process may call it, or none."""
        for each in self._snapshots.values():
            each.wait()

    @one_at_a_time
    def saved_in_memory(self, path: str | Path) -> list[int]:
        """The steps of the snapshots that count, the newest last. Every process must call it.

        Args:
            path: the folder of the checkpoints that they belong to.

        Raises:
            UserError: on every process, when there is no folder for snapshots.
        """
        place = checkpoint_path(path)
        self._core.enter(f"snapshots of {place}")
        return [each.step for each in self._snapshots_of(place).there()]

    @one_at_a_time
    def load_from_memory(
        self, path: str | Path, step: int, extra: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Go on from a snapshot, as `load` does from a checkpoint. Every process must call it.

        Each host gets the files that its ranks read and that it does not have from one that has them.

        Args:
            path: the folder of the checkpoints that it belongs to.
            step: one of `saved_in_memory`.
            extra: as `load` takes it.

        Raises:
            DamagedCheckpoint: on every process: the parts of some ranks are on no host any more, or damaged.
            UserError: as `load` does.
        """
        place = checkpoint_path(path)
        self._core.check_open("load")
        self._core.enter(f"load {place} from memory, step {step}")
        with self._snapshots_of(place).reading(step) as reading:
            return self._load(Weights(reading.folder), extra or {}, bring=reading.bring)

    @property
    def is_first(self) -> bool:
        """True in the process that writes for all: that of rank 0."""
        return 0 in self.world.ranks

    @property
    def exchange(self) -> Callable[[str], list[str]] | None:
        """Gives the texts of all processes, given this one's, which all must call; None where it is the only one."""
        return self._exchange if self._core.setting.several else None

    @one_at_a_time
    def _exchange(self, text: str) -> list[str]:
        self._core.enter("exchange")
        return told(self.world, "texts", lambda: text)

    def _close_saving(self) -> None:
        """Wait for what is still written or sent.

        Raises:
            UserError: when a checkpoint could not be written.
            RankFailure: another process has gone.
        """
        snapshots, self._snapshots = self._snapshots, {}
        with ExitStack() as stack:
            stack.callback(self._written)
            for each in snapshots.values():
                stack.callback(each.close)

    def _to_save(self, call: str, text: str) -> tuple[ProgramState, dict[str, Any]]:
        """The content of a checkpoint: tensors and states, and what is neither, as JSON."""
        core, state = self._core, self._state()
        about = about_program(state, core.steps, core.step.optimizers)
        core.enter(f"{text}, options {zlib.crc32(json.dumps(about['groups']).encode()):x}")
        if core.training is not None:
            core.training.take()
            self._check_no_gradients(call)
        return state, about

    def _load(
        self,
        weights: Weights,
        extra: Mapping[str, Any],
        model_only: bool = False,
        bring: Callable[[Manifest, Collection[str]], None] | None = None,
    ) -> dict[str, Any]:
        core = self._core
        if core.failed is None:
            self._check_no_gradients("load")
        found = load(self._state(), weights, core.step.optimizers, extra, model_only, bring)
        own, model = dict(found.extra), core.setting.model
        agreed(core.setting.world, "modules", lambda: put_module_states(own, model))
        core.steps = int(found.about.get("steps", core.steps))
        core.note_loaded()
        return own

    def _state(self) -> ProgramState:
        core = self._core
        return ProgramState(core.setting, core.compiled.graph, core.training)

    def _check_no_gradients(self, call: str) -> None:
        training = self._core.training
        if training is not None and training.gradients.standing():
            raise UserError(
                f"program.{call}: gradients wait in parameter.grad, and a checkpoint holds none; call "
                "program.update() or model.zero_grad() first"
            )

    def _written(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.wait()

    def _snapshots_of(self, place: Path) -> Snapshots:
        if place not in self._snapshots:
            world = self.world
            self._snapshots[place] = Snapshots(world, shelf_of(world, place))
        return self._snapshots[place]
