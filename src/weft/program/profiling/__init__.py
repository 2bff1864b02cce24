"""Figures of this machine for a program: costs measured by all its ranks side by side."""
