"""The blocks that random programs are made of, by name."""

from __future__ import annotations

from tools.random_programs.blocks import experts, features, images, papers, strange, tokens
from tools.random_programs.blocks.block import BLOCKS, Block, Draw, fitting

__all__ = [
    "BLOCKS",
    "Block",
    "Draw",
    "experts",
    "features",
    "fitting",
    "images",
    "papers",
    "strange",
    "tokens",
]
