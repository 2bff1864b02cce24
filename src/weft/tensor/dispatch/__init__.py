"""An op on global tensors: its recipe, its operands, and what is written in place."""
