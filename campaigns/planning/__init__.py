"""What a campaign is to do: its file, and the faults and runs that come of it."""
