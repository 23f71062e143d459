#pragma once

#include <string>
#include <vector>

namespace turbomind {

// Returns the instruction sets that this build contains (TM_CPU_ISAS) and this machine can run,
// slowest first: "scalar", "avx2", "avx512", "amx". Throws InvalidArgument if there is none.
std::vector<std::string> AvailableCpuIsas();

}  // namespace turbomind
