"""Passes on plans, on the rank that runs them: kernels of its device, repeated layers, CUDA graphs."""
