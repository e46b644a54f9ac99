"""Data: the sources that real runs train on."""
