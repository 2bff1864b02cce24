"""Loaders and batches: one order on any number of ranks, of which each process loads and cuts what its ranks take."""
