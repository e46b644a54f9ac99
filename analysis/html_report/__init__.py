"""A self-contained HTML report of a folder's Results, sweeps and studies: scripts and images are inside, no network."""
