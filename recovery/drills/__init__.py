"""Faults on purpose: the table of them, how one is written, and which are refused."""
