"""Making the runs: what is started, watched, started again, and left over."""
