#include "turbomind/ops/copy_heads.h"

#include <algorithm>
#include <cstring>

#include "turbomind/core/ceil_div.h"
#include "turbomind/core/float_convert.h"
#include "turbomind/ops/device.h"

namespace turbomind {
namespace {

constexpr int64_t kMinParallelValues = 16384;  // below this, waking a worker costs more

// Copies a row of n values, `stride` bytes apart, as FP32.
void LoadRow(const std::byte* from, DataType dtype, int64_t stride, int n, float* to) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(from);
  if (stride == SizeOf(dtype)) {
    switch (dtype) {
      case DataType::kFloat32:
        std::memcpy(to, bytes, static_cast<size_t>(n) * sizeof(float));
        return;
      case DataType::kFloat16:
        for (int i = 0; i < n; ++i) {
          to[i] = LoadAs(bytes, DataType::kFloat16, i);
        }
        return;
      case DataType::kBFloat16:
        for (int i = 0; i < n; ++i) {
          to[i] = LoadAs(bytes, DataType::kBFloat16, i);
        }
        return;
    }
  }
  for (int i = 0; i < n; ++i) {
    to[i] = LoadAs(bytes + i * stride, dtype, 0);
  }
}

void StoreRow(const float* from, DataType dtype, int64_t stride, int n, std::byte* to) {
  if (dtype == DataType::kFloat32 && stride == SizeOf(dtype)) {
    std::memcpy(to, from, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  auto* bytes = reinterpret_cast<uint8_t*>(to);
  for (int i = 0; i < n; ++i) {
    StoreAs(from[i], dtype, bytes + i * stride, 0);
  }
}

}  // namespace

void ForEachRowOnHost(Device& device, int64_t num_rows, int row_values,
                      FunctionRef<void(int64_t row)> fn) {
  if (num_rows * row_values < kMinParallelValues) {
    for (int64_t row = 0; row < num_rows; ++row) {
      fn(row);
    }
    return;
  }
  const int64_t rows = CeilDiv(kMinParallelValues, row_values);
  device.ForEachOnHost(CeilDiv(num_rows, rows), [&](int64_t item, int) {
    const int64_t end = std::min(num_rows, (item + 1) * rows);
    for (int64_t row = item * rows; row < end; ++row) {
      fn(row);
    }
  });
}

void CopyHeadsOnHost(Device& device, const CopyHeadsParams& params) {
  const int64_t tokens = int64_t{params.num_seqs} * params.num_tokens;
  ForEachRowOnHost(device, tokens * params.num_heads, params.head_dim, [&](int64_t i) {
    const int64_t token = i / params.num_heads;
    const int64_t head = i % params.num_heads;
    std::byte* const in_array = params.array + token / params.num_tokens * params.strides[0] +
                                head * params.strides[1] +
                                token % params.num_tokens * params.strides[2];
    float* const in_rows =
        params.rows + (token * params.row_heads + params.first_head + head) * params.head_dim;
    if (params.to_rows) {
      LoadRow(in_array, params.dtype, params.strides[3], params.head_dim, in_rows);
    } else {
      StoreRow(in_rows, params.dtype, params.strides[3], params.head_dim, in_array);
    }
  });
}

}  // namespace turbomind
