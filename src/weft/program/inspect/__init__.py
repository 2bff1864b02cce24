"""Looks into a program: explanations, tables, traces, reports."""
