"""Run plans: queues, communicators, kernels, and the worlds of ranks that share a process or do not."""
