#include "turbomind/backend/cpu/cpu_codec_rows.h"

#include <cmath>
#include <string>

#include "turbomind/core/check.h"
#include "turbomind/kv/layout.h"

namespace turbomind {
namespace {

struct RowSizes {
  int64_t payload;
  int64_t metadata;
};

RowSizes CheckRows(const CodecRows& shape) {
  const int group = InfoOf(shape.format).group;
  const int multiple = group > 0 ? group : 2;
  if (shape.head_dim <= 0 || shape.head_dim % multiple != 0) {
    throw InvalidArgument("head_dim", "is " + std::to_string(shape.head_dim) +
                                          ". It must be a positive multiple of " +
                                          std::to_string(multiple) + " for " +
                                          ToString(shape.format) + ".");
  }
  if (!(shape.global_scale > 0.f) || !std::isfinite(shape.global_scale)) {
    throw InvalidArgument("global_scale", "is " + std::to_string(shape.global_scale) +
                                              ". It must be positive and finite.");
  }
  return {block::RowBytes(shape.format, shape.head_dim, shape.dtype),
          block::ParamBytes(shape.format, shape.dtype) +
              block::ScaleBytes(shape.format, shape.head_dim)};
}

}  // namespace

int64_t EncodeRows(const CpuKvKernels& kernels, const CodecRows& shape, const float* rows,
                   uint8_t* payload, uint8_t* metadata) {
  const RowSizes sizes = CheckRows(shape);
  const RowFormat row_format = {shape.format, shape.head_dim, shape.dtype, shape.global_scale,
                                shape.search};
  int64_t num_nonfinite = 0;
  for (int64_t i = 0; i < shape.num_rows; ++i) {
    num_nonfinite += kernels
                         .encode_row(row_format, rows + i * shape.head_dim,
                                     payload + i * sizes.payload, metadata + i * sizes.metadata)
                         .nonfinite;
  }
  return num_nonfinite;
}

void DecodeRows(const CpuKvKernels& kernels, const CodecRows& shape, const uint8_t* payload,
                const uint8_t* metadata, float* rows) {
  const RowSizes sizes = CheckRows(shape);
  const RowFormat row_format = {shape.format, shape.head_dim, shape.dtype, shape.global_scale,
                                false};
  for (int64_t i = 0; i < shape.num_rows; ++i) {
    kernels.decode_row(row_format, payload + i * sizes.payload, metadata + i * sizes.metadata,
                       rows + i * shape.head_dim);
  }
}

}  // namespace turbomind
