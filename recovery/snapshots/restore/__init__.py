"""From storage back into logs, every byte checked."""
