"""weft trains one PyTorch model on many devices."""
