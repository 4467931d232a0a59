"""Who speaks to whom: certificates, channels, and who reaches whom."""
