"""Settings for every test."""

import os

# Tests do not use the user's cache. test_weight_cache.py and test_tuner.py create their own.
os.environ["LMDEPLOY_CACHE"] = "0"
os.environ["LMDEPLOY_TUNER"] = "0"
# `auto` means the CPU, unless LMDEPLOY_TEST_CUDA names a CUDA library. test_devices.py runs
# the CUDA backend in subprocesses.
os.environ["LMDEPLOY_CUDA_LIBRARY"] = os.environ.get("LMDEPLOY_TEST_CUDA", os.devnull)
