"""The experiments that decide whether a distance head is worth it; README.md is their protocol."""
