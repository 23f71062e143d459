#pragma once

// ⑦ Which decode kernels are built, and the one that a layer takes.

#include <cstddef>

#include "turbomind/backend/cuda/decode/decode_shape.cuh"
#include "turbomind/backend/cuda/runtime/runtime.h"

namespace turbomind::cuda {

// A kernel for one pair of formats, dtype, head_dim and tile.
struct DecodeVariant {
  void (*kernel)(DecodeParams) = nullptr;  // null: none is built
  size_t shared_bytes = 0;
  int threads = 0;
  int heads = 0;  // query heads of a block
};

struct DecodeFormat {
  KvCacheMode k = KvCacheMode::kNone;
  KvCacheMode v = KvCacheMode::kNone;
  DataType dtype = DataType::kBFloat16;
  bool small_blocks = false;  // of 16 positions
  bool many_heads = false;    // more than kHeadTile query heads of a KV head
};

// Built for kHeadDim 64, 80, 96, 128 and 256, for every listed pair of formats and both 16-bit
// dtypes; kMixed: K and V differ. Each in a file of its own, for the compiler's sake.
template <int kHeadDim, bool kMixed>
DecodeVariant FindVariant(const DecodeFormat& format);

// `group`: query heads of a KV head. Throws InvalidArgument for a layer that no kernel is built
// for; every kernel fits a GPU with kMaxShared. Reads no address.
DecodeVariant FindDecodeVariant(const KvLayerView& kv, int group, const GpuProperties& gpu);

}  // namespace turbomind::cuda
