"""What stands in the way of moving a worker, and what this machine lacks."""
