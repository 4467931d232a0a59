"""What a run was, from what its processes wrote down."""
