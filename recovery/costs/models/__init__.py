"""What failures cost: by formulas, and by simulated months."""
