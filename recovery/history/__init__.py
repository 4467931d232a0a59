"""What was done and noticed, of running jobs and of ended ones; the report of a run."""
