"""A strategy's rules for a training step: gradients, states and precision, and the results kept for the backward."""
