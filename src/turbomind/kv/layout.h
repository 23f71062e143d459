#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "turbomind/core/dtype.h"
#include "turbomind/core/host_device.h"
#include "turbomind/kv/kv_format.h"

namespace turbomind {

enum class KvSide : int { kK = 0, kV = 1 };

// Returns the number of values that one Hadamard rotation mixes: the largest power of two that
// divides head_dim.
TM_HD constexpr int RotationSize(int head_dim) { return head_dim & -head_dim; }

// Returns 1 / sqrt(size), rounded to float. REQUIRES: size is a power of two.
TM_HD constexpr float RotationNorm(int size) {
  float norm = 1.f;
  for (; size >= 4; size /= 4) {
    norm *= 0.5f;
  }
  return size == 2 ? norm * 0.70710678f : norm;
}

// The largest head_dim of attention. A device may have fewer kernels (Device::RequireAttention).
inline constexpr int kMaxHeadDim = 512;

// One row of a block. metadata is null if the format has none.
struct KvRow {
  uint8_t* payload;
  uint8_t* metadata;
};

// The kernels' view of one layer of the pools. It locates every byte of a block. The struct is
// plain data, made by block::Layout::LayerView. Addresses are 64-bit; block ids come from block
// tables.
//
// Data pool, per block and layer:  [kv_head][K|V][token][row_bytes], then for int8 and int4
// [kv_head][K|V][token](scale, zero) in `dtype`. With a K offset, one row of int8 per head follows:
// [kv_head][head_dim], then [kv_head](scale, zero), together a multiple of 64 bytes. Scale pool:
// [kv_head][token][K | V] bytes.
//
// With a K offset, K is what the codes mean plus the block's offset row (kv/k_offset.h).
//
// In a layer with latents (multi-head latent attention) the two sides have their own widths. A row
// of side V is a token's latent, and a row of side K has what a key has beside it: the rotary part.
// A key is the row of V followed by the row of K; a value is the row of V. There is one KV head.
// The offset is that of the latents.
struct KvLayerView {
  std::byte* data = nullptr;    // data pool, already offset to this layer
  std::byte* scales = nullptr;  // scale pool, already offset to this layer; null without FP4
  int64_t block_bytes = 0;
  int64_t scale_block_bytes = 0;
  KvCacheMode format[2] = {KvCacheMode::kNone, KvCacheMode::kNone};  // by KvSide
  DataType dtype = DataType::kBFloat16;  // of 16-bit values and of (scale, zero)
  int block_seq_len = 0;
  int kv_heads = 0;
  int head_dim = 0;             // values of a row of V, and of K unless rotary_dim is set
  int rotary_dim = 0;           // values of a row of K in a layer with latents; 0: no latents
  int row_bytes[2] = {0, 0};    // payload bytes of one token's row, by KvSide
  int param_bytes[2] = {0, 0};  // bytes of (scale, zero) per token; 0 if the format has none
  int scale_bytes[2] = {0, 0};  // scale pool bytes per token and head; 0 if the format has none
  int64_t param_offset = 0;     // offset of the (scale, zero) region in the layer
  // Offsets of the two regions of K offsets in the layer; 0 if blocks have no K offset.
  int64_t k_offset_codes = 0;
  int64_t k_offset_params = 0;
  const float* global_scale[2] = {nullptr,
                                  nullptr};  // [kv_heads] FP32 scale per head; null means 1.0

  // Returns the first token's payload row of (block, head, side). Rows follow at stride
  // row_bytes[side].
  TM_HD std::byte* Payload(KvSide side, int64_t block, int head) const {
    const int s = static_cast<int>(side);
    const int64_t per_head = static_cast<int64_t>(row_bytes[0] + row_bytes[1]) * block_seq_len;
    return data + block * block_bytes + head * per_head +
           (s ? static_cast<int64_t>(row_bytes[0]) * block_seq_len : 0);
  }
  // Returns the first token's (scale, zero) of (block, head, side). Stride: param_bytes[side].
  TM_HD std::byte* Params(KvSide side, int64_t block, int head) const {
    const int s = static_cast<int>(side);
    const int64_t per_head = static_cast<int64_t>(param_bytes[0] + param_bytes[1]) * block_seq_len;
    return data + block * block_bytes + param_offset + head * per_head +
           (s ? static_cast<int64_t>(param_bytes[0]) * block_seq_len : 0);
  }
  // Returns the first token's scale bytes of (block, head, side). Stride: ScaleStride().
  TM_HD std::byte* Scales(KvSide side, int64_t block, int head) const {
    const int s = static_cast<int>(side);
    return scales + block * scale_block_bytes +
           static_cast<int64_t>(head) * block_seq_len * ScaleStride() + (s ? scale_bytes[0] : 0);
  }
  // Returns the row of a token: its payload, and its (scale, zero) or its scale bytes.
  TM_HD KvRow Row(KvSide side, int64_t block, int head, int slot) const {
    const int s = static_cast<int>(side);
    std::byte* metadata = nullptr;
    if (scale_bytes[s] > 0) {
      metadata = Scales(side, block, head) + static_cast<int64_t>(slot) * ScaleStride();
    } else if (param_bytes[s] > 0) {
      metadata = Params(side, block, head) + static_cast<int64_t>(slot) * param_bytes[s];
    }
    std::byte* payload = Payload(side, block, head) + static_cast<int64_t>(slot) * row_bytes[s];
    return {reinterpret_cast<uint8_t*>(payload), reinterpret_cast<uint8_t*>(metadata)};
  }
  TM_HD bool HasLatents() const { return rotary_dim > 0; }
  // Returns the values of a row.
  TM_HD int Dim(KvSide side) const {
    return side == KvSide::kK && HasLatents() ? rotary_dim : head_dim;
  }
  TM_HD int ScaleStride() const { return scale_bytes[0] + scale_bytes[1]; }
  TM_HD bool HasKOffset() const { return k_offset_codes != 0; }
  // Returns the side whose rows have the offset: latents are the larger part of a key.
  TM_HD KvSide OffsetSide() const { return HasLatents() ? KvSide::kV : KvSide::kK; }
  TM_HD bool HasOffset(KvSide side) const { return HasKOffset() && side == OffsetSide(); }
  // Returns the offset row of a block's keys or latents, in int8. REQUIRES: HasKOffset().
  TM_HD KvRow KOffset(int64_t block, int head) const {
    std::byte* layer = data + block * block_bytes;
    return {reinterpret_cast<uint8_t*>(layer + k_offset_codes + head * head_dim),
            reinterpret_cast<uint8_t*>(layer + k_offset_params + head * 2 * SizeOf(dtype))};
  }

  // Returns a view of heads [first, first + count).
  KvLayerView Heads(int first, int count) const;
};

namespace block {

// One layer group: the layers that share block ids. They are all full-attention layers, or all
// layers with one sliding window length.
struct Config {
  struct LayerFormats {
    KvCacheMode k = KvCacheMode::kNone;
    KvCacheMode v = KvCacheMode::kNone;
  };
  std::vector<LayerFormats> layers;  // the group's layers in model order
  int kv_heads = 0;
  int head_dim = 0;
  int rotary_dim = 0;  // as in KvLayerView
  int block_seq_len = 64;
  DataType dtype = DataType::kBFloat16;
  bool k_offset = false;  // of every layer whose K, or latents, are quantized
};

// Computes the position of each byte of a block.
// Invariants:
//  1. Every layer and head offset is a multiple of 16 bytes; so are the two block sizes.
//  2. block_bytes() and scale_block_bytes() depend on the config alone.
// Throws InvalidArgument for a head_dim that a KV format cannot store, a block length that
// IsBlockSeqLen (kv/block_seq_len.h) rejects, and a pair of formats that IsListedPair rejects, or
// IsLatentPair for latents.
class Layout {
 public:
  explicit Layout(Config config);

  const Config& config() const { return config_; }
  int64_t block_bytes() const { return block_bytes_; }
  int64_t scale_block_bytes() const { return scale_block_bytes_; }  // 0 without FP4
  // Returns the bytes of one token over all layers of the group, metadata and scales included.
  double bytes_per_token() const;

  // `layer` is an index into config().layers.
  KvLayerView LayerView(int layer, std::byte* data_pool, std::byte* scale_pool) const;

 private:
  Config config_;
  std::vector<int64_t> layer_offset_;
  std::vector<int64_t> scale_layer_offset_;
  int64_t block_bytes_ = 0;
  int64_t scale_block_bytes_ = 0;
};

// Returns the payload bytes of one row of `head_dim` values.
int RowBytes(KvCacheMode format, int head_dim, DataType dtype);
// Returns the bytes of (scale, zero) per row; 0 unless the format is int8 or int4.
int ParamBytes(KvCacheMode format, DataType dtype);
// Returns the scale pool bytes per row; 0 unless the format is FP4.
int ScaleBytes(KvCacheMode format, int head_dim);

}  // namespace block
}  // namespace turbomind
