"""What all systems train in the benchmarks: models in plain PyTorch, batches, losses, optimizers, in two sizes."""
