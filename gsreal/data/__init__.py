"""Data sources for real runs: bundled data, folders of text or images, and GLUE."""
