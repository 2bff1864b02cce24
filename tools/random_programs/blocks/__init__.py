"""The blocks that random programs are made of, by name."""

from __future__ import annotations

from tools.random_programs.blocks import (
    algebra,
    experts,
    features,
    images,
    modules,
    papers,
    places,
    strange,
    tokens,
)
from tools.random_programs.blocks.block import BLOCKS, Block, Draw, fitting

__all__ = [
    "BLOCKS",
    "Block",
    "Draw",
    "algebra",
    "experts",
    "features",
    "fitting",
    "images",
    "modules",
    "papers",
    "places",
    "strange",
    "tokens",
]
