"""From a stored set to a checkpoint that scripts load."""
