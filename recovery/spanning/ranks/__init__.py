"""A rank as one host tells another of it."""
