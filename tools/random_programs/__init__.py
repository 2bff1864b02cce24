"""Random programs under random strategies, compared with plain PyTorch: what nobody thought of."""
