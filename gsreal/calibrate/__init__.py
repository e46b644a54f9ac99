"""Calibration: micro-benchmarks of this machine, and the cluster file that they make."""
