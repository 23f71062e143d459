"""What holds for every test."""

import os

# Tests do not use the user's cache; checkpoint/test_weight_cache.py has its own.
os.environ["LMDEPLOY_CACHE"] = "0"
# `auto` is the CPU; engine/test_devices.py has a GPU of its own.
os.environ["LMDEPLOY_CUDA_LIBRARY"] = os.devnull
