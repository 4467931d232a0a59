"""The second tier: a directory at any fsspec URL."""
