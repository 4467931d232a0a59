"""What is remembered of a job and its ranks: values that everybody above may look at."""
