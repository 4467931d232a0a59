"""Stores: where device servers meet, that of migratable workers, and the way to another host's."""
