"""Snapshots that outlive the machine: how often they are taken, how they are written and found again."""
