"""The `gssim` command line."""

from gssim.cli.commands import app, main

__all__ = ["app", "main"]
