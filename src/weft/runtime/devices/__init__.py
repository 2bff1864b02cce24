"""Device types as those who run plans see them: a row of a table each (`backend.py`), and the parts that it names."""
