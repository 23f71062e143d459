#pragma once

#include <string>
#include <vector>

namespace turbomind {

// Returns the instruction sets that this build contains and this machine can run, slowest first:
// "scalar", "avx2", "avx512", "amx".
std::vector<std::string> AvailableCpuIsas();

}  // namespace turbomind
