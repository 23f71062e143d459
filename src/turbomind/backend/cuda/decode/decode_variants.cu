#include <string>

#include "turbomind/backend/cuda/decode/decode_variants.h"
#include "turbomind/core/check.h"

namespace turbomind::cuda {
namespace {

constexpr int kSmallBlock = 16;

template <int D>
DecodeVariant FindOf(const DecodeFormat& format) {
  return format.k == format.v ? FindVariant<D, false>(format) : FindVariant<D, true>(format);
}

DecodeVariant Find(int head_dim, const DecodeFormat& format) {
  switch (head_dim) {
    case 64:
      return FindOf<64>(format);
    case 80:
      return FindOf<80>(format);
    case 96:
      return FindOf<96>(format);
    case 128:
      return FindOf<128>(format);
    case 256:
      return FindOf<256>(format);
    default:
      throw InvalidArgument("head_dim: got " + std::to_string(head_dim) +
                            ", want 64, 80, 96, 128 or 256 on a GPU; use --device cpu");
  }
}

}  // namespace

DecodeVariant FindDecodeVariant(const KvLayerView& kv, int group, const GpuProperties& gpu) {
  if (kv.dtype == DataType::kFloat32) {
    throw InvalidArgument(
        "dtype: got float32, want float16 or bfloat16 on a GPU; use --dtype bfloat16 or --device "
        "cpu");
  }
  const DecodeVariant variant = Find(
      kv.head_dim,
      {kv.format[0], kv.format[1], kv.dtype, kv.block_seq_len == kSmallBlock, group > kHeadTile});
  Check(variant.kernel != nullptr, "the formats of K and V are a listed pair");
  if (variant.shared_bytes > gpu.shared_bytes_per_block) {  // none of today's: kMaxShared
    throw InvalidArgument("head_dim " + std::to_string(kv.head_dim) + " with K " +
                          ToString(kv.format[0]) + " and V " + ToString(kv.format[1]) + ": got " +
                          gpu.name + " with " + std::to_string(gpu.shared_bytes_per_block) +
                          " bytes of shared memory per block, want " +
                          std::to_string(variant.shared_bytes) + "; use --device cpu");
  }
  return variant;
}

}  // namespace turbomind::cuda
