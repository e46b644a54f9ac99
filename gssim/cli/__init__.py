"""The `gssim` command line."""

from gssim.cli.commands import main
from gssim.cli.search_report import print_found

__all__ = ["main", "print_found"]
