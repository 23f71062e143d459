#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "turbomind/ops/device.h"

namespace turbomind {

// Names of the instruction sets that this build carries and this machine can run, slowest first:
// "scalar", "avx2", "avx512", "amx".
std::vector<std::string> AvailableCpuIsas();

// A CPU device with its own thread pool. `isa` is one of AvailableCpuIsas(), or empty for the best
// one (LMDEPLOY_CPU_ISA in the environment pins it). Throws InvalidArgument naming the choices.
std::unique_ptr<Device> MakeCpuDevice(int num_threads, std::string_view isa = "");

}  // namespace turbomind
