"""Figures of this machine for a program: measured_costs by all its ranks side by side."""
