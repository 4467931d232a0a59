"""What a proxyd that died has left, and how its successor takes it over."""
