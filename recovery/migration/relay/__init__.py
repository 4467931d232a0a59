"""What stays with the launcher while a worker is elsewhere."""
