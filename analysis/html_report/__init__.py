"""One self-contained HTML page of what a folder holds: no network, no scripts, images inside."""
