"""A simulated deployment that serves recorded agent sessions, to compare rules of routing."""
