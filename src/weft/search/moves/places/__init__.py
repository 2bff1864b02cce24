"""Moves of where parts of a model stand: ranks of their own, stages cut, joined and resized, runs of layouts."""
