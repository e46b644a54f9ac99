"""Compares predictions with measurements, in tables and charts."""
