"""The leader's side: ranks of other hosts, as if they were here, and what outlives the leader."""
