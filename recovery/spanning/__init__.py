"""The two sides of a job on several hosts: one proxyd leads, with the coordinator; others do as it says."""
