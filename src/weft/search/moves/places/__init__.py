"""Moves of where parts of a model stand: on ranks of their own, in stages cut, joined and resized; layouts along runs."""
