"""The report as one self-contained HTML page, also served on loopback."""
