"""The ranks of this host: device servers, who holds which device, and drills carried out."""
