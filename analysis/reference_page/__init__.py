"""`scenarios/README.md`: every key of the files that people write, as the classes say that read them."""

from analysis.reference_page.page import page

__all__ = ["page"]
