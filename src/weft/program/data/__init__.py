"""Loaders: batches in one order on any number of ranks, of which each process loads the rows that its ranks take."""
