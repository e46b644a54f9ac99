"""The `gssim` command line."""

from gssim.cli.commands import main

__all__ = ["main"]
