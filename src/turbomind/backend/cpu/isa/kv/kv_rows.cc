// ⑥ Encodes, decodes and rotates whole rows.

#include "turbomind/backend/cpu/isa/kv/kv_rows.h"

#include "turbomind/backend/cpu/isa/attention/kv_rotate.h"
#include "turbomind/backend/cpu/isa/kv/kv_encode.h"
#include "turbomind/kv/codec.h"
#include "turbomind/kv/layout.h"

namespace turbomind::TM_ISA {

RowCounts EncodeRow(const RowFormat& row_format, const float* row, uint8_t* payload,
                    uint8_t* metadata) {
  return DispatchFormat(row_format.format, [&]<KvCacheMode M>() {
    if constexpr (!Codec<M>::kHasScales) {  // rows with scales are whole groups of kLanes values
      if (row_format.n % kLanes != 0) {
        return DefinedEncoder<M>::Encode(row_format, row, payload, metadata);
      }
    }
    return RowEncoder<M>::Encode(row_format, row, payload, metadata);
  });
}

void DecodeRow(const RowFormat& row_format, const uint8_t* payload, const uint8_t* metadata,
               float* row) {
  const auto [format, n, dtype, global_scale, search] = row_format;
  if (format == KvCacheMode::kNone && n % kLanes == 0) {
    return DecodeNone(payload, n, dtype, row);
  }
  DispatchFormat(format, [&, n = n, dtype = dtype, scale = global_scale]<KvCacheMode M>() {
    Codec<M>::DecodeRow(payload, metadata, n, dtype, scale, row);
  });
}

namespace {

void RotateRow(float* row, int n) { HadamardRow(row, n, RotationSize(n)); }

}  // namespace

void FillRowKernels(CpuRowKernels& kernels) {
  kernels.encode_row = EncodeRow;
  kernels.decode_row = DecodeRow;
  kernels.rotate_row = RotateRow;
}

}  // namespace turbomind::TM_ISA
