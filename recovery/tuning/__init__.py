"""How often snapshots should be taken: asked of a running job."""
