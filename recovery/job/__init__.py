"""Recovery of one job, on the host that leads it: from the notice of a fault to the replay."""
