"""weft against PyTorch's OpInfo database: `python -m tools.opinfo` writes docs/ops.md."""
