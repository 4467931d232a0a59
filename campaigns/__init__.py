"""Campaigns: each way of outliving faults, on the same trainings, under the same faults (paper 002)."""
