"""What rules and kernels mean, written for clarity: they are checked against these."""
