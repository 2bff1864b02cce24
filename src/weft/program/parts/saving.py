"""Checkpoints and snapshots of a program: what it saves, and how it goes on from there."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, final

from weft.errors import UserError
from weft.program.everyone import agreed
from weft.program.parts.core import ProgramCore
from weft.program.saving.groups import about_program
from weft.program.saving.load import load
from weft.program.saving.manifest import Manifest, put_back
from weft.program.saving.memory.shelf import shelf_of
from weft.program.saving.memory.snapshots import Snapshots
from weft.program.saving.paths import checkpoint_path
from weft.program.saving.program_state import ProgramState
from weft.program.saving.save import save
from weft.program.saving.saved_tensors import put_module_states, with_module_states
from weft.program.saving.weights import Weights, located
from weft.program.saving.writing import Writing


@final
class ProgramSaving:
    """The checkpoints and snapshots of a program.

    Args:
        core: of the program.

    Attributes:
        snapshots: by the folder of the checkpoints that they belong to.
    """

    def __init__(self, core: ProgramCore) -> None:
        self.snapshots: dict[Path, Snapshots] = {}
        self._core = core
        self._writing: Writing | None = None

    def save(
        self, path: str | Path, extra: Mapping[str, Any] | None, wait: bool, replace: bool
    ) -> None:
        """As `Program.save` says."""
        place = checkpoint_path(path)
        self._core.make_ready("save")
        state, about = self._to_save("save", f"save {place}")
        before, self._writing = self._writing, None
        given = with_module_states(extra, self._core.setting.model)
        self._writing = save(state, place, about, given, before, wait, replace)

    def wait_for_saved(self) -> None:
        """As `Program.wait_for_saved` says."""
        self._core.enter("wait for the last checkpoint")
        agreed(self._core.setting.world, "what was written", self._written)

    def load(
        self, path: str | Path | Weights, extra: Mapping[str, Any] | None, model_only: bool
    ) -> dict[str, Any]:
        """As `Program.load` says."""
        weights, place = located(path)
        model_only = model_only or isinstance(path, Weights)
        self._core.check_open("load")
        self._core.enter(f"load {place}")
        world = self._core.setting.world
        first = 0 in world.ranks
        agreed(world, "the last checkpoint", self._written)
        agreed(world, "its place", lambda: put_back(place) if first else None)
        return self._load(weights, extra or {}, model_only)

    def save_in_memory(self, path: str | Path, extra: Mapping[str, Any] | None) -> None:
        """As `Program.save_in_memory` says."""
        place = checkpoint_path(path)
        self._core.make_ready("save")
        state, about = self._to_save("save_in_memory", f"save {place} in memory")
        given = with_module_states(extra, self._core.setting.model)
        self._snapshots_of(place).take(state, self._core.steps, about, given)

    def wait_for_memory(self) -> None:
        """As `Program.wait_for_memory` says."""
        for each in self.snapshots.values():
            each.wait()

    def saved_in_memory(self, path: str | Path) -> list[int]:
        """As `Program.saved_in_memory` says."""
        place = checkpoint_path(path)
        self._core.enter(f"snapshots of {place}")
        return [each.step for each in self._snapshots_of(place).there()]

    def load_from_memory(
        self, path: str | Path, step: int, extra: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """As `Program.load_from_memory` says."""
        place = checkpoint_path(path)
        self._core.check_open("load")
        self._core.enter(f"load {place} from memory, step {step}")
        with self._snapshots_of(place).reading(step) as reading:
            return self._load(Weights(reading.folder), extra or {}, bring=reading.bring)

    def close(self) -> None:
        """Wait for what is still written or sent.

        Raises:
            UserError: when a checkpoint could not be written.
            RankFailure: another process has gone.
        """
        snapshots, self.snapshots = self.snapshots, {}
        with ExitStack() as stack:
            stack.callback(self._written)
            for each in snapshots.values():
                stack.callback(each.close)

    def _to_save(self, call: str, text: str) -> tuple[ProgramState, dict[str, Any]]:
        """The content of a checkpoint: tensors and states, and what is neither, as JSON.

        Args:
            call: a method of programs.
            text: the call, in words.
        """
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
        if place not in self.snapshots:
            world = self._core.setting.world
            self.snapshots[place] = Snapshots(world, shelf_of(world, place))
        return self.snapshots[place]
