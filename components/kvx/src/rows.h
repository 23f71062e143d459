#pragma once

// Rows of values between dtypes, with the row kernels of the CPU device.

#include <cstddef>
#include <cstdint>

#include "kvx/kvx_abi.h"
#include "kvx/src/validate.h"
#include "turbomind/backend/cpu/row_kernels.h"

namespace kvx {

// The fastest kernels of this machine. They are found once.
inline const turbomind::CpuRowKernels& RowKernels() {
  static const turbomind::CpuRowKernels kernels = turbomind::FastestCpuRowKernels();
  return kernels;
}

// REQUIRES: IsFloat(dtype).
inline turbomind::DataType FloatType(int dtype) {
  return dtype == KVX_DTYPE_F32   ? turbomind::DataType::kFloat32
         : dtype == KVX_DTYPE_F16 ? turbomind::DataType::kFloat16
                                  : turbomind::DataType::kBFloat16;
}

// Returns how a plain row of n values is stored. FP8 codes are those of x / scale.
inline turbomind::RowFormat PlainFormat(int dtype, int64_t n, float scale = 1.f) {
  using turbomind::KvCacheMode;
  turbomind::RowFormat format;
  format.n = static_cast<int>(n);
  format.dtype = turbomind::DataType::kFloat32;
  format.global_scale = scale;
  if (IsFp8(dtype)) {
    format.format = dtype == KVX_DTYPE_F8_E4M3 ? KvCacheMode::kFp8E4m3 : KvCacheMode::kFp8E5m2;
  } else {
    format.dtype = FloatType(dtype);
  }
  return format;
}

inline void LoadRow(const std::byte* from, int dtype, int64_t n, float* row) {
  RowKernels().decode_row(PlainFormat(dtype, n), reinterpret_cast<const uint8_t*>(from), nullptr,
                          row);
}

inline void StoreRow(const float* row, const turbomind::RowFormat& format, std::byte* to) {
  RowKernels().encode_row(format, row, reinterpret_cast<uint8_t*>(to), nullptr);
}

}  // namespace kvx
