"""Tiers behind the device pools: rows of prefixes in host memory and in files."""
