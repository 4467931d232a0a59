"""What a bill is made of, and where each value comes from."""
