"""Cached KV blocks outside an engine: as bytes, in files, and in Redis."""
