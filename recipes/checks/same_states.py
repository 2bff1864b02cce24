"""Compare the tensors of two files of safetensors or `torch.save`.

    python recipes/checks/same_states.py one.ckpt other.ckpt

Ends with 1 where a name, a shape or a value differs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

# Of what a checkpoint of Lightning holds, the trained part.
TRAINED = ("state_dict", "optimizer_states")


def tensors(found: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors in nested dicts and lists, by their place."""
    if isinstance(found, Tensor):
        yield name, found
    elif isinstance(found, dict):
        for key, value in found.items():
            yield from tensors(value, f"{name}.{key}")
    elif isinstance(found, list | tuple):
        for number, value in enumerate(found):
            yield from tensors(value, f"{name}[{number}]")


def loaded(path: Path) -> dict[str, Tensor]:
    """The tensors of a file."""
    if path.suffix == ".safetensors":
        return load_file(path)
    found = torch.load(path, map_location="cpu", weights_only=True)
    return dict(tensors({name: found[name] for name in TRAINED if name in found} or found))


def main() -> int:
    one, other = (loaded(Path(path)) for path in sys.argv[1:])
    if one.keys() != other.keys():
        print(f"names: {sorted(one.keys() ^ other.keys())}")
        return 1
    if not one:
        print("no tensors")
        return 1
    for name in one:
        if type(other[name]) not in (Tensor, torch.nn.Parameter):
            print(f"{name} is a {type(other[name])}")
            return 1
        # Where gradients are zero but for rounding, as of keys' biases, Adam goes as rounding says.
        torch.testing.assert_close(other[name], one[name], rtol=1e-3, atol=1e-3)
    print(f"{len(one)} tensors are the same")
    return 0


if __name__ == "__main__":
    sys.exit(main())
