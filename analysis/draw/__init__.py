"""Drawings of clusters."""
