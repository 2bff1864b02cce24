"""Gathers of parameters for each use: in the order of their use, a few ahead."""
