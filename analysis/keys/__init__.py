"""`scenarios/README.md`: every key of the files that people write, as the classes say that read them."""

from analysis.keys.page import page

__all__ = ["page"]
