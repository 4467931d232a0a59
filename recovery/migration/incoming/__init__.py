"""Workers that came from other hosts."""
