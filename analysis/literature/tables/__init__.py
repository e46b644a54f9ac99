"""Readers of published tables of training runs, one for each kind of table."""
