// ⑥ Codecs of whole rows.

#include "turbomind/backend/cpu/isa/kv/kv_rows.h"

#include "turbomind/backend/cpu/isa/attention/attention.h"
#include "turbomind/backend/cpu/isa/kv/kv_encode.h"
#include "turbomind/kv/codec.h"

namespace turbomind::TM_ISA {

namespace {

// Any length, by the definition.
int EncodeByDefinition(const RowFormat& format, const float* row, uint8_t* payload,
                       uint8_t* metadata) {
  const auto [mode, n, dtype, g, search] = format;
  switch (mode) {
    case KvCacheMode::kNone:
      return Codec<KvCacheMode::kNone>::EncodeRow(row, n, dtype, g, payload, metadata);
    case KvCacheMode::kInt8:
      return Codec<KvCacheMode::kInt8>::EncodeRow(row, n, dtype, g, payload, metadata);
    case KvCacheMode::kInt4:
      return Codec<KvCacheMode::kInt4>::EncodeRow(row, n, dtype, g, payload, metadata);
    case KvCacheMode::kFp8E4m3:
      return Codec<KvCacheMode::kFp8E4m3>::EncodeRow(row, n, dtype, g, payload, metadata);
    case KvCacheMode::kFp8E5m2:
      return Codec<KvCacheMode::kFp8E5m2>::EncodeRow(row, n, dtype, g, payload, metadata);
    case KvCacheMode::kFp4Mx:
    case KvCacheMode::kFp4Nv:
      break;  // a multiple of 16
  }
  __builtin_unreachable();
}

}  // namespace

RowCounts EncodeRow(const RowFormat& format, const float* row, uint8_t* payload,
                    uint8_t* metadata) {
  const int n = format.n;
  const KvCacheMode mode = format.mode;
  if (mode == KvCacheMode::kFp4Nv) {
    return EncodeFp4<NvScale>(format, row, payload, metadata);
  }
  if (mode == KvCacheMode::kFp4Mx) {
    return EncodeFp4<MxScale>(format, row, payload, metadata);
  }
  if (n % kLanes == 0) {
    if (mode == KvCacheMode::kInt8) {
      return {EncodeInt<8>(row, n, format.dtype, payload, metadata), 0};
    }
    if (mode == KvCacheMode::kInt4) {
      return {EncodeInt<4>(row, n, format.dtype, payload, metadata), 0};
    }
    if (mode == KvCacheMode::kFp8E4m3) {
      return EncodeFp8<true>(format, row, payload);
    }
    if (mode == KvCacheMode::kFp8E5m2) {
      return EncodeFp8<false>(format, row, payload);
    }
    if (mode == KvCacheMode::kNone) {
      return {EncodeNone(row, n, format.dtype, payload), 0};
    }
  }
  const float limit = ClipLimit(mode, format.g);
  return {EncodeByDefinition(format, row, payload, metadata),
          CountClipped(row, n, format.dtype, limit)};
}

void DecodeRow(const RowFormat& format, const uint8_t* payload, const uint8_t* metadata,
               float* row) {
  const auto [mode, n, dtype, g, search] = format;
  switch (mode) {
    case KvCacheMode::kNone:
      if (n % kLanes == 0) {
        return DecodeNone(payload, n, dtype, row);
      }
      return Codec<KvCacheMode::kNone>::DecodeRow(payload, metadata, n, dtype, g, row);
    case KvCacheMode::kInt8:
      return Codec<KvCacheMode::kInt8>::DecodeRow(payload, metadata, n, dtype, g, row);
    case KvCacheMode::kInt4:
      return Codec<KvCacheMode::kInt4>::DecodeRow(payload, metadata, n, dtype, g, row);
    case KvCacheMode::kFp8E4m3:
      return Codec<KvCacheMode::kFp8E4m3>::DecodeRow(payload, metadata, n, dtype, g, row);
    case KvCacheMode::kFp8E5m2:
      return Codec<KvCacheMode::kFp8E5m2>::DecodeRow(payload, metadata, n, dtype, g, row);
    case KvCacheMode::kFp4Mx:
      return Codec<KvCacheMode::kFp4Mx>::DecodeRow(payload, metadata, n, dtype, g, row);
    case KvCacheMode::kFp4Nv:
      return Codec<KvCacheMode::kFp4Nv>::DecodeRow(payload, metadata, n, dtype, g, row);
  }
  __builtin_unreachable();
}

void FillKvKernels(CpuKvKernels& kernels) {
  kernels.decode_splits = DecodeSplits;
  kernels.merge_splits = MergeSplits;
  kernels.prefill_rows = PrefillRows;
  kernels.process_head = ProcessHead;
  kernels.encode_row = EncodeRow;
  kernels.decode_row = DecodeRow;
}

}  // namespace turbomind::TM_ISA
