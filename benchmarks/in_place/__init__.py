"""The time from the death of a rank to the first step after it, in place and by a restart."""
