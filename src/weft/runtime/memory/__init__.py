"""The tensors that a rank holds: its variables and batches, notes of what is made, copies between host and device."""
