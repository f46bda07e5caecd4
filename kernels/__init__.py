"""The engine: a transformer trained by hand-written operations."""
