"""Deduction: one layout for every value and operand, the cheapest in total; and the boxing between them."""
