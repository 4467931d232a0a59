"""proxyd put together: its parts, its gRPC service, its metrics."""
