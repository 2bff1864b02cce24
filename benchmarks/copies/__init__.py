"""Copies of activations that plans of pipelines keep, beside those that torch's analysis of its schedules counts."""
