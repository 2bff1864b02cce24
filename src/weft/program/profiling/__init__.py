"""Figures of the machine at hand for a program: measured_costs by all its ranks side by side."""
