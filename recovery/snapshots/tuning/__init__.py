"""How often, and how many at a time: measured, computed (PCcheck, section 3.4), and adapted."""
