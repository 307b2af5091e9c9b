"""Papers and comparisons, run again; README.md has a row for each figure."""
