"""Profiler traces of other people's jobs as measured Results."""
