"""Jobs on several hosts put together on this one: who leads, what others ask, workers that come and go."""
