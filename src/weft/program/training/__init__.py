"""The tensors that a program that trains keeps between steps: gradients and the optimizer's states."""
