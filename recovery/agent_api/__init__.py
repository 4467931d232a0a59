"""What those who decide tell those who do: commands to device servers, of this host and of others alike."""
