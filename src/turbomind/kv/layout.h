#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "turbomind/core/dtype.h"
#include "turbomind/core/host_device.h"
#include "turbomind/kv/kv_cache_mode.h"

namespace turbomind {

enum class KvSide : int { kK = 0, kV = 1 };

// One layer of the pools as kernels see it: where each byte of a block lies. Plain data; made by
// block::Layout::LayerView. Addresses are 64-bit; block ids come from block tables.
//
// Per block and layer, data pool:  [kv_head][K|V][token][row_bytes], then for int8/int4
// [kv_head][K|V][token](scale, zero) in `dtype`. Scale pool: [kv_head][token][K | V] bytes.
struct KvLayerView {
  std::byte* data = nullptr;    // data pool, already offset to this layer
  std::byte* scales = nullptr;  // scale pool, already offset to this layer; null without FP4
  int64_t block_bytes = 0;
  int64_t scale_block_bytes = 0;
  KvCacheMode format[2] = {KvCacheMode::kNone, KvCacheMode::kNone};  // by KvSide
  DataType dtype = DataType::kBFloat16;  // of mode none and of (scale, zero)
  int block_seq_len = 0;
  int kv_heads = 0;
  int head_dim = 0;
  int row_bytes[2] = {0, 0};    // payload bytes of one token's row, by KvSide
  int param_bytes[2] = {0, 0};  // bytes of (scale, zero) per token, 0 where there is none
  int scale_bytes[2] = {0, 0};  // scale pool bytes per token and head, 0 where there is none
  int64_t param_offset = 0;     // of the (scale, zero) region inside the layer
  const float* global_scale[2] = {nullptr,
                                  nullptr};  // [kv_heads] FP32 per-head factor; null means 1.0

  // First token's payload row of (block, head, side); tokens follow at stride row_bytes[side].
  TM_HD std::byte* Payload(KvSide side, int64_t block, int head) const {
    const int s = static_cast<int>(side);
    const int64_t per_head = static_cast<int64_t>(row_bytes[0] + row_bytes[1]) * block_seq_len;
    return data + block * block_bytes + head * per_head +
           (s ? static_cast<int64_t>(row_bytes[0]) * block_seq_len : 0);
  }
  // First token's (scale, zero) of (block, head, side); stride param_bytes[side].
  TM_HD std::byte* Params(KvSide side, int64_t block, int head) const {
    const int s = static_cast<int>(side);
    const int64_t per_head = static_cast<int64_t>(param_bytes[0] + param_bytes[1]) * block_seq_len;
    return data + block * block_bytes + param_offset + head * per_head +
           (s ? static_cast<int64_t>(param_bytes[0]) * block_seq_len : 0);
  }
  // First token's scale bytes of (block, head, side); stride ScaleStride().
  TM_HD std::byte* Scales(KvSide side, int64_t block, int head) const {
    const int s = static_cast<int>(side);
    return scales + block * scale_block_bytes +
           static_cast<int64_t>(head) * block_seq_len * ScaleStride() + (s ? scale_bytes[0] : 0);
  }
  TM_HD int ScaleStride() const { return scale_bytes[0] + scale_bytes[1]; }

  // Heads [first, first + count) as a layer.
  KvLayerView Heads(int first, int count) const;
};

namespace block {

// One layer group: the layers that share block ids (all full-attention layers, or all layers of one
// sliding window length).
struct Config {
  struct LayerFormats {
    KvCacheMode k = KvCacheMode::kNone;
    KvCacheMode v = KvCacheMode::kNone;
  };
  std::vector<LayerFormats> layers;  // of this group, in model order
  int kv_heads = 0;
  int head_dim = 0;
  int block_seq_len = 64;
  DataType dtype = DataType::kBFloat16;
};

// Where each byte of a block lies.
// Invariants:
//  1. Every layer and head offset is a multiple of 16 bytes; so are the two block sizes.
//  2. block_bytes() and scale_block_bytes() follow from the config alone.
// Throws InvalidArgument for a head_dim that a mode cannot store, a block length outside
// {16, 32, 64, 128} and a pair of modes that is not listed.
class Layout {
 public:
  explicit Layout(Config config);

  const Config& config() const { return config_; }
  int64_t block_bytes() const { return block_bytes_; }
  int64_t scale_block_bytes() const { return scale_block_bytes_; }  // 0 without FP4
  // Bytes of one token over all layers of the group, metadata and scales included.
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

// Payload bytes of one row of `head_dim` values.
int RowBytes(KvCacheMode format, int head_dim, DataType dtype);
// Bytes of (scale, zero) per row: int8 and int4 only.
int ParamBytes(KvCacheMode format, DataType dtype);
// Scale pool bytes per row: FP4 only.
int ScaleBytes(KvCacheMode format, int head_dim);

}  // namespace block
}  // namespace turbomind
