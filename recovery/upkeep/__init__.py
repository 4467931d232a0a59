"""What is done for a job while nothing fails: the watch, floors, snapshots, validations, planned moves."""
