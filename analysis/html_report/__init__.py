"""A self-contained HTML report of a folder's Results, sweeps and studies: no network, no scripts, images inside."""
