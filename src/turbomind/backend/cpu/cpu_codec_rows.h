#pragma once

// Encodes and decodes rows outside a cache with the kernels of the CPU device, for tests and
// reports.

#include <cstdint>

#include "turbomind/backend/cpu/kv_kernels.h"

namespace turbomind {

// Shape of the rows.
struct CodecRows {
  KvCacheMode format = KvCacheMode::kNone;
  DataType dtype = DataType::kBFloat16;
  float global_scale = 1.f;
  int64_t num_rows = 0;
  int head_dim = 0;
  bool search = false;  // search FP4 scales for the least squared error
};
// Encodes rows [num_rows, head_dim] into payload [num_rows, block::RowBytes] and metadata
// [num_rows, block::ParamBytes + block::ScaleBytes]. Returns the number of NaN and infinite values.
// Throws InvalidArgument if the format cannot store head_dim, or if global_scale is not positive
// and finite.
int64_t EncodeRows(const CpuKvKernels& kernels, const CodecRows& shape, const float* rows,
                   uint8_t* payload, uint8_t* metadata);
void DecodeRows(const CpuKvKernels& kernels, const CodecRows& shape, const uint8_t* payload,
                const uint8_t* metadata, float* rows);

}  // namespace turbomind
