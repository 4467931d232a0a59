"""What failures cost, and what each way of recovering from them saves: GPU-hours and dollars (paper 001, §5).

Pure, but for `inputs.py`, which reads files.  The planner is asked which rung of the ladder a failure takes.
"""
