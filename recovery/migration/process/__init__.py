"""A worker's processes: dumped, checked, restored."""
