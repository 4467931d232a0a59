"""What all else stands on: control-plane messages, background tasks, errors as sentences, logging, times."""
