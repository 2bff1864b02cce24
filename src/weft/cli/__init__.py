"""The command `weft`."""
