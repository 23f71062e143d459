"""File containers: memory-mapped safetensors and GGUF files."""
