"""Other engines that the benchmarks compare with."""
