"""Communicators as their ranks hold them, and the collectives made of their primitives."""
