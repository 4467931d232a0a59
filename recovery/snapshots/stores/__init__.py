"""Where stores lie, what they hold, and what of it may go."""
