"""What holds for every test."""

import os

# The user's cache is none of the tests' business; tests/python/test_packed_cache.py has its own.
os.environ["LMDEPLOY_CACHE"] = "0"
# `auto` is the CPU; tests/python/test_devices.py has a GPU of its own.
os.environ["LMDEPLOY_CUDA_LIBRARY"] = os.devnull
