"""A worker on its way from host to host."""
