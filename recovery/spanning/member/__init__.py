"""A member's side: it does as the leader says, and may have to lead."""
