#pragma once

#include <memory>
#include <string_view>

#include "turbomind/backend/cpu/cpu_isa.h"
#include "turbomind/ops/device.h"

namespace turbomind {

struct CpuOptions {
  // Round the activations of quantized matrices to 8 bits (dense_kernels.h).
  bool int8_activations = false;
  // Give a row the same bits in every batch and with every instruction set. If false and
  // activations do not have 8 bits, AVX-512 rounds them to 12 bits for kQ4_0, kQ4_1 and kQ4_K, and
  // AMX computes many rows at once in BF16.
  bool deterministic = true;
};

// Creates a CPU device with its own thread pool. `isa` is one of AvailableCpuIsas(). If it is
// empty, the environment variable LMDEPLOY_CPU_ISA selects the instruction set; without it, the
// fastest is used. Throws InvalidArgument with the available choices.
std::unique_ptr<Device> MakeCpuDevice(int num_threads, std::string_view isa = "",
                                      const CpuOptions& options = {});

}  // namespace turbomind
