"""Decides how a job survives its devices: the planner (pure), proxyd, proxyrun and recoveryctl.

Nothing here executes device work, and nothing here imports PyTorch.
"""
