"""Worlds of ranks: in one process or in many, how they are launched and find each other."""
