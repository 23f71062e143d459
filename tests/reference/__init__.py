"""An independent NumPy specification of the KV cache formats, RoPE, attention and the decoder.

It is written from docs/kv_cache.md alone and shares no code with the engine. It prefers the
plainest formula to speed, so a disagreement means that one of the two is wrong.
"""
