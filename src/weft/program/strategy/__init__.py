"""Strategies: which layouts the user fixes, as readable data."""
