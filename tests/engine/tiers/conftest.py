"""The tier tests use the worlds of the engine and prefix tests."""
