// ⑥ Encodes and decodes whole rows.

#include "turbomind/backend/cpu/isa/kv/kv_rows.h"

#include "turbomind/backend/cpu/isa/attention/attention.h"
#include "turbomind/backend/cpu/isa/kv/kv_encode.h"
#include "turbomind/kv/codec.h"

namespace turbomind::TM_ISA {

namespace {

// Encodes a row of any length with the reference codec.
int EncodeByDefinition(const RowFormat& row_format, const float* row, uint8_t* payload,
                       uint8_t* metadata) {
  const auto [format, n, dtype, global_scale, search] = row_format;
  switch (format) {
    case KvCacheMode::kNone:
      return Codec<KvCacheMode::kNone>::EncodeRow(row, n, dtype, global_scale, payload, metadata);
    case KvCacheMode::kInt8:
      return Codec<KvCacheMode::kInt8>::EncodeRow(row, n, dtype, global_scale, payload, metadata);
    case KvCacheMode::kInt4:
      return Codec<KvCacheMode::kInt4>::EncodeRow(row, n, dtype, global_scale, payload, metadata);
    case KvCacheMode::kFp8E4m3:
      return Codec<KvCacheMode::kFp8E4m3>::EncodeRow(row, n, dtype, global_scale, payload,
                                                     metadata);
    case KvCacheMode::kFp8E5m2:
      return Codec<KvCacheMode::kFp8E5m2>::EncodeRow(row, n, dtype, global_scale, payload,
                                                     metadata);
    case KvCacheMode::kFp4Mx:
    case KvCacheMode::kFp4Nv:
      break;  // FP4 rows are handled by EncodeFp4
  }
  __builtin_unreachable();
}

}  // namespace

RowCounts EncodeRow(const RowFormat& row_format, const float* row, uint8_t* payload,
                    uint8_t* metadata) {
  const int n = row_format.n;
  const KvCacheMode format = row_format.format;
  if (format == KvCacheMode::kFp4Nv) {
    return EncodeFp4<NvScale>(row_format, row, payload, metadata);
  }
  if (format == KvCacheMode::kFp4Mx) {
    return EncodeFp4<MxScale>(row_format, row, payload, metadata);
  }
  if (n % kLanes == 0) {
    if (format == KvCacheMode::kInt8) {
      return {EncodeInt<8>(row, n, row_format.dtype, payload, metadata), 0};
    }
    if (format == KvCacheMode::kInt4) {
      return {EncodeInt<4>(row, n, row_format.dtype, payload, metadata), 0};
    }
    if (format == KvCacheMode::kFp8E4m3) {
      return EncodeFp8<true>(row_format, row, payload);
    }
    if (format == KvCacheMode::kFp8E5m2) {
      return EncodeFp8<false>(row_format, row, payload);
    }
    if (format == KvCacheMode::kNone) {
      return {EncodeNone(row, n, row_format.dtype, payload), 0};
    }
  }
  const float limit = ClipLimit(format, row_format.global_scale);
  return {EncodeByDefinition(row_format, row, payload, metadata),
          CountClipped(row, n, row_format.dtype, limit)};
}

void DecodeRow(const RowFormat& row_format, const uint8_t* payload, const uint8_t* metadata,
               float* row) {
  const auto [format, n, dtype, global_scale, search] = row_format;
  switch (format) {
    case KvCacheMode::kNone:
      if (n % kLanes == 0) {
        return DecodeNone(payload, n, dtype, row);
      }
      return Codec<KvCacheMode::kNone>::DecodeRow(payload, metadata, n, dtype, global_scale, row);
    case KvCacheMode::kInt8:
      return Codec<KvCacheMode::kInt8>::DecodeRow(payload, metadata, n, dtype, global_scale, row);
    case KvCacheMode::kInt4:
      return Codec<KvCacheMode::kInt4>::DecodeRow(payload, metadata, n, dtype, global_scale, row);
    case KvCacheMode::kFp8E4m3:
      return Codec<KvCacheMode::kFp8E4m3>::DecodeRow(payload, metadata, n, dtype, global_scale,
                                                     row);
    case KvCacheMode::kFp8E5m2:
      return Codec<KvCacheMode::kFp8E5m2>::DecodeRow(payload, metadata, n, dtype, global_scale,
                                                     row);
    case KvCacheMode::kFp4Mx:
      return Codec<KvCacheMode::kFp4Mx>::DecodeRow(payload, metadata, n, dtype, global_scale, row);
    case KvCacheMode::kFp4Nv:
      return Codec<KvCacheMode::kFp4Nv>::DecodeRow(payload, metadata, n, dtype, global_scale, row);
  }
  __builtin_unreachable();
}

void FillKvKernels(CpuKvKernels& kernels) {
  kernels.decode_splits = DecodeSplits;
  kernels.merge_splits = MergeSplits;
  kernels.prefill_rows = PrefillRows;
  kernels.write_head = WriteHead;
  kernels.encode_row = EncodeRow;
  kernels.decode_row = DecodeRow;
}

}  // namespace turbomind::TM_ISA
