"""What a strategy says of a training step's gradients, states and precision, and of what is kept for the backward."""
