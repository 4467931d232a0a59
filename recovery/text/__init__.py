"""What people read: tables, status, logs."""
