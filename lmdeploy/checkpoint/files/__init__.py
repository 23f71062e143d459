"""File containers: tensors in safetensors and GGUF files, mapped into memory."""
