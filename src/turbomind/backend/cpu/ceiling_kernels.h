#pragma once

// Loops that do nothing but read, or nothing but multiply, compiled once per instruction set (isa/)
// with the instructions of its linear layers. Plain structs, as in dense_kernels.cuh.

#include <cstdint>

namespace turbomind {

inline constexpr int64_t kCeilingOperandBytes = 4096;  // stays in L1

// `rounds` times `operations` multiply-adds on kCeilingOperandBytes of operands, 64-byte aligned.
// Returns the sum, so that nothing is left out. Null: the instruction set has none.
struct MultiplyCeiling {
  float (*run)(const uint8_t* operands, int64_t rounds) = nullptr;
  int64_t operations = 0;  // of a round, 2 per multiply-add
};

struct CpuCeilingKernels {
  // Every byte once; num_bytes is a multiple of 512. Returns a checksum.
  uint64_t (*read)(const uint8_t* data, int64_t num_bytes) = nullptr;
  MultiplyCeiling int8;
  MultiplyCeiling bf16;
  MultiplyCeiling fp32;
  MultiplyCeiling tile_int8;  // on matrix tiles (AMX)
  MultiplyCeiling tile_bf16;
};

namespace scalar {
void FillCeilingKernels(CpuCeilingKernels& kernels);
}
namespace avx2 {
void FillCeilingKernels(CpuCeilingKernels& kernels);
}
namespace avx512 {
void FillCeilingKernels(CpuCeilingKernels& kernels);
}
namespace amx {
void FillCeilingKernels(CpuCeilingKernels& kernels);
}

}  // namespace turbomind
