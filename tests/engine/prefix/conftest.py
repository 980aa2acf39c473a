"""The prefix tests use the worlds of the engine tests."""
