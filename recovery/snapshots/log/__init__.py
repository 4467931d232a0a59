"""The log behind a stored set, frame by frame."""
