"""An independent NumPy specification of the KV cache formats, RoPE, attention and the decoder.

Written from docs/kv_cache.md alone. It shares no code with the engine, and favors the plainest
formula over speed, so that a disagreement points at one of the two.
"""
