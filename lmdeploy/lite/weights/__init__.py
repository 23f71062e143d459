"""Quantize the weights of a Hugging Face folder: `lmdeploy lite auto_gptq` and `auto_awq`."""
