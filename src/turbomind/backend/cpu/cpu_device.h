#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "turbomind/ops/device.h"

namespace turbomind {

// Returns the instruction sets that this build contains and this machine can run, slowest first:
// "scalar", "avx2", "avx512", "amx".
std::vector<std::string> AvailableCpuIsas();

// Creates a CPU device with its own thread pool. `isa` is one of AvailableCpuIsas(). If it is
// empty, the environment variable LMDEPLOY_CPU_ISA selects the instruction set; without it, the
// fastest is used. Throws InvalidArgument with the available choices.
std::unique_ptr<Device> MakeCpuDevice(int num_threads, std::string_view isa = "");

}  // namespace turbomind
