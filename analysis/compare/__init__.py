"""Comparison of predicted and measured Results."""
