#pragma once

// ⑥⑦ The kernels over rows of K and V, which need no other part of the engine. As kv_kernels.h,
// this header has only plain structs, and every kernel returns the same bits with every instruction
// set.

#include <cstdint>

#include "turbomind/core/dtype.h"
#include "turbomind/kv/kv_format.h"

namespace turbomind {

// The storage format of one row of n values (docs/kv_cache.md).
struct RowFormat {
  KvCacheMode format = KvCacheMode::kNone;
  int n = 0;
  DataType dtype = DataType::kBFloat16;
  float global_scale = 1.f;
  bool search = false;  // search FP4 scales for the least squared error
};

// Values of encoded rows that are not finite, and finite ones beyond the format's ClipLimit.
struct RowCounts {
  int nonfinite = 0;
  int clipped = 0;
};

struct CpuRowKernels {
  // Convert one row to payload and metadata, and back.
  RowCounts (*encode_row)(const RowFormat&, const float* row, uint8_t* payload,
                          uint8_t* metadata) = nullptr;
  void (*decode_row)(const RowFormat&, const uint8_t* payload, const uint8_t* metadata,
                     float* row) = nullptr;
  // Rotates K, in runs of RotationSize(n). It is its own inverse. REQUIRES: n is a multiple of 16.
  void (*rotate_row)(float* row, int n) = nullptr;
};

// Returns the kernels of the fastest instruction set that this machine can run.
CpuRowKernels FastestCpuRowKernels();

namespace scalar {
void FillRowKernels(CpuRowKernels& kernels);
}
namespace avx2 {
void FillRowKernels(CpuRowKernels& kernels);
}
namespace avx512 {
void FillRowKernels(CpuRowKernels& kernels);
}

}  // namespace turbomind
