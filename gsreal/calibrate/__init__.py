"""Calibration: micro-benchmarks of this machine, and the cluster file written from them."""
