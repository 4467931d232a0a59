"""Pure: facts -> plan.  No clock, no I/O, no process; what hangs, what is consistent, who has whose bytes."""
