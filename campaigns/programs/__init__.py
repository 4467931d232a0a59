"""What a campaign trains: a script of our own, the same for all ways, and what keeps its state in each."""
