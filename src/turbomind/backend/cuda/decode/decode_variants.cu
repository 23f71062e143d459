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
      throw InvalidArgument("head_dim",
                            std::to_string(head_dim) +
                                " is not supported on a GPU, only 64, 80, 96, 128, 256 and "
                                "multiples of 16 from 272 to 512. Use --device cpu.");
  }
}

}  // namespace

DecodeVariant FindDecodeVariant(const KvLayerView& kv, int group, const GpuProperties& gpu) {
  if (kv.dtype == DataType::kFloat32) {
    throw InvalidArgument(
        "dtype", "float32 is not supported on a GPU. Use --dtype bfloat16 or --device cpu.");
  }
  const DecodeVariant variant = Find(
      kv.head_dim,
      {kv.format[0], kv.format[1], kv.dtype, kv.block_seq_len == kSmallBlock, group > kHeadTile});
  Check(variant.kernel != nullptr, "the formats of K and V must be a listed pair");
  if (variant.shared_bytes > gpu.shared_bytes_per_block) {  // not with today's kernels: kMaxShared
    throw InvalidArgument(
        "head_dim", std::to_string(kv.head_dim) + " with K " + ToString(kv.format[0]) + " and V " +
                        ToString(kv.format[1]) + " does not fit " + gpu.name + ", which has " +
                        std::to_string(gpu.shared_bytes_per_block) +
                        " bytes of shared memory per block. It needs " +
                        std::to_string(variant.shared_bytes) + ". Use --device cpu.");
  }
  return variant;
}

}  // namespace turbomind::cuda
