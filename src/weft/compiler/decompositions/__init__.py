"""Decompositions of ops that become several calls where their layouts split them."""
