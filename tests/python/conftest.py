"""What holds for every test."""

import os

# The user's cache is none of the tests' business; tests/python/test_packed_cache.py has its own.
os.environ["LMDEPLOY_CACHE"] = "0"
