"""Which engine computes a prompt and which one generates: from what every engine's caches hold,
what is in flight, and stated costs. Pure: no engine, no clock, no network; `front` adds those.
"""
