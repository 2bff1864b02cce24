"""What a device type gives to those who run plans: a row of a table (`backend.py`), and what it names."""
