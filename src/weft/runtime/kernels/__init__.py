"""Ops on local tensors: the functions that segments are made of."""
