#pragma once

// ⑦ The decode kernels that are built, and the choice of one for a layer.

#include <cstddef>

#include "turbomind/backend/cuda/decode/decode_shape.cuh"
#include "turbomind/backend/cuda/runtime/runtime.h"

namespace turbomind::cuda {

// A kernel for one pair of formats, dtype, head_dim and tile.
struct DecodeVariant {
  void (*kernel)(DecodeParams) = nullptr;  // null: none is built
  size_t shared_bytes = 0;
  int threads = 0;
  int heads = 0;  // query heads per block
};

struct DecodeFormat {
  KvCacheMode k = KvCacheMode::kNone;
  KvCacheMode v = KvCacheMode::kNone;
  DataType dtype = DataType::kBFloat16;
  bool small_blocks = false;  // of 16 positions
  bool many_heads = false;    // more than kHeadTile query heads per KV head
};

// Built for kHeadDim 64, 80, 96, 128 and 256, every listed pair of formats and both 16-bit dtypes.
// kMixed: K and V differ. Each combination of the two has its own file, so that they compile in
// parallel.
template <int kHeadDim, bool kMixed>
DecodeVariant FindVariant(const DecodeFormat& format);

// `group` is the number of query heads per KV head. Throws InvalidArgument if no kernel is built
// for the layer. Every kernel fits a GPU with kMaxShared. Reads no address.
DecodeVariant FindDecodeVariant(const KvLayerView& kv, int group, const GpuProperties& gpu);

}  // namespace turbomind::cuda
