"""Files with a model's values that are under other names, or not all there: which of them goes where."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import final

from weft.errors import UserError, wrong
from weft.program.saving.manifest import Manifest, Stored, checkpoint_path
from weft.program.saving.program_state import BUFFERS, MASTERS, MODEL


@final
@dataclass(frozen=True)
class Weights:
    r"""Files with values of a model's parameters and buffers, for `weights=` of `weft.compile` and `Program.load`.

    Args:
        path: a checkpoint, or a folder of safetensors files.
        names: regular expressions with what takes the place of their matches in the names of the files, one after
            the other, as `key_mapping` of transformers has them: `{"^": "transformer."}` for a model around the one
            whose files these are, `{r"LayerNorm\.gamma$": "LayerNorm.weight"}`.
        strict: as in `load_state_dict`; False takes what there is, and the log "weft" says what was missing, which
            keeps its values, and unexpected. Other shapes are refused all the same.

    Raises:
        UserError: an argument is of another kind, or no regular expression.
    """

    path: str | Path
    names: Mapping[str, str] = field(default_factory=dict)
    strict: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.strict, bool):
            raise wrong("weft.Weights: strict", "True or False", self.strict)
        given = self.names if isinstance(self.names, Mapping) else {None: None}
        if not all(isinstance(each, str) for each in (*given, *given.values())):
            expected = (
                "a dict of regular expressions and what takes the place of their matches, such as "
                '{"^": "transformer."}'
            )
            raise wrong("weft.Weights: names", expected, self.names)
        renamed("", self.names)


def renamed_in(manifest: Manifest, names: Mapping[str, str]) -> Manifest:
    """The tensors of files under the names of the model, as `Weights` has them."""
    if not names:
        return manifest
    found: dict[str, Stored] = {}
    for name, stored in manifest.tensors.items():
        kinds = (MODEL, BUFFERS, MASTERS) if manifest.about else ()
        kind = next((kind for kind in kinds if name.startswith(kind)), "")
        new = kind + renamed(name.removeprefix(kind), names)
        if new in found:
            raise UserError(
                f"names={dict(names)} make {new} of two tensors in {manifest.folder}, {name} is one of them; "
                "use patterns that keep them apart"
            )
        found[new] = stored
    return Manifest(manifest.folder, found, manifest.about)


def located(weights: str | Path | Weights) -> tuple[Weights, Path]:
    """Weights whose path is that of a checkpoint from the root, and this path."""
    given = weights if isinstance(weights, Weights) else Weights(weights)
    place = checkpoint_path(given.path)
    return replace(given, path=place), place


def renamed(name: str, names: Mapping[str, str]) -> str:
    """A name with the matches of each regular expression replaced.

    Raises:
        UserError: one is none.
    """
    for pattern, text in names.items():
        try:
            name = re.sub(pattern, text, name)
        except (re.error, IndexError) as error:
            raise UserError(
                f"names={{{pattern!r}: {text!r}}}: {error}; expected a regular expression of Python and what takes "
                "the place of its matches"
            ) from None
    return name
