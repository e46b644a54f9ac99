"""Explains: predicted beside measured, as tables and charts."""
