"""`recoveryctl`: one file a command."""
