"""The batch cut in time: the same training step, computed in micro-batches."""
