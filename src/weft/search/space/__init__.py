"""The space that is enumerated: points, by their coordinates, and which of them keep what is fixed."""
