"""Batches: what each rank takes of them."""
