"""Pages of scores: what each was made from, and whether it still holds (`python -m tools.scores`)."""
