"""What must outlive the host that leads a job: its record, in the cluster's store."""
