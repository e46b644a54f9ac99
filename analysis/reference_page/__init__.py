"""Generator of `scenarios/README.md`: the reference of all keys of the input files, from the classes that read them."""

from analysis.reference_page.page import page

__all__ = ["page"]
