"""Moving a worker's process: what stands in the way, and the CRIU that dumps and restores it."""
