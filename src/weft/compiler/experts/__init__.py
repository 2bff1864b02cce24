"""Mixtures of experts whose experts a strategy splits: rows to their experts and back."""
