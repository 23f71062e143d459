#pragma once

// A small cache of one sequence for tests of the KV cache ops. The codecs write random rows; all
// other bytes are poisoned, and block ids are shuffled.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

#include "turbomind/backend/cpu/kv_kernels.h"
#include "turbomind/kv/codec.h"
#include "turbomind/kv/k_offset.h"
#include "turbomind/kv/layout.h"

namespace turbomind {

struct CacheShape {
  KvCacheMode k = KvCacheMode::kNone;
  KvCacheMode v = KvCacheMode::kNone;
  DataType dtype = DataType::kBFloat16;
  int head_dim = 64;
  int kv_heads = 2;
  int block_seq_len = 64;
  int context = 333;
  int first_block = 1;  // lowest id in use; every second id is used
  bool k_offset = false;
};

inline int EncodeByCodec(const RowFormat& f, const float* row, uint8_t* payload, uint8_t* meta) {
  return DispatchFormat(f.format, [&]<KvCacheMode M>() {
    return f.search ? Codec<M>::template EncodeRow<true>(row, f.n, f.dtype, f.global_scale, payload,
                                                         meta)
                    : Codec<M>::EncodeRow(row, f.n, f.dtype, f.global_scale, payload, meta);
  });
}

inline RowCounts EncodeAndCount(const RowFormat& f, const float* row, uint8_t* payload,
                                uint8_t* meta) {
  return {EncodeByCodec(f, row, payload, meta),
          CountClipped(row, f.n, f.dtype, ClipLimit(f.format, f.global_scale))};
}

inline void DecodeByCodec(const RowFormat& f, const uint8_t* payload, const uint8_t* meta,
                          float* row) {
  DispatchFormat(f.format, [&]<KvCacheMode M>() {
    Codec<M>::DecodeRow(payload, meta, f.n, f.dtype, f.global_scale, row);
  });
}

class TestCache {
 public:
  explicit TestCache(const CacheShape& shape, uint8_t poison = 0xff, unsigned seed = 1)
      : shape_(shape), layout_(MakeConfig(shape)), random_(seed) {
    const int blocks = (shape.context + shape.block_seq_len - 1) / shape.block_seq_len;
    num_blocks_ = 2 * blocks + shape.first_block;  // blocks between those in use stay poisoned
    data_.assign(static_cast<size_t>(num_blocks_ * layout_.block_bytes()),
                 static_cast<std::byte>(poison));
    scales_.assign(static_cast<size_t>(num_blocks_ * layout_.scale_block_bytes()),
                   static_cast<std::byte>(poison));
    for (int i = 0; i < blocks; ++i) {
      table_.push_back(2 * (blocks - 1 - i) + shape.first_block);
    }
    view_ = layout_.LayerView(0, data_.data(), scales_.empty() ? nullptr : scales_.data());
    for (int head = 0; head < shape.kv_heads; ++head) {
      global_scales_[0].push_back(0.75f + 0.5f * head);
      global_scales_[1].push_back(1.25f - 0.5f * head);
    }
    for (int side = 0; side < 2; ++side) {
      if (HasGlobalScale(view_.format[side])) {
        view_.global_scale[side] = global_scales_[side].data();
      }
      decoded_[side].resize(static_cast<size_t>(shape.kv_heads) * shape.context * shape.head_dim);
    }
    std::normal_distribution<float> normal;
    std::vector<float> row(shape.head_dim);
    for (int i = 0; view_.HasKOffset() && i < blocks * shape.kv_heads; ++i) {
      for (float& x : row) {
        x = 3.f * normal(random_);
      }
      const KvRow to = view_.KOffset(table_[i / shape.kv_heads], i % shape.kv_heads);
      KOffsetCodec::EncodeRow(row.data(), shape.head_dim, shape.dtype, 1.f, to.payload,
                              to.metadata);
    }
    for (int side = 0; side < 2; ++side) {
      for (int head = 0; head < shape.kv_heads; ++head) {
        for (int t = 0; t < shape.context; ++t) {
          for (float& x : row) {
            x = normal(random_);
          }
          Write(static_cast<KvSide>(side), head, t, row.data());
        }
      }
    }
  }

  void Write(KvSide side, int head, int token, const float* row) {
    const int s = static_cast<int>(side);
    uint8_t* meta = Metadata(side, head, token);
    uint8_t* payload = PayloadRow(side, head, token);
    const RowFormat row_format = {view_.format[s], shape_.head_dim, shape_.dtype,
                                  GlobalScale(side, head), false};
    EncodeByCodec(row_format, row, payload, meta);
    float* decoded = Decoded(side, head, token);
    DecodeByCodec(row_format, payload, meta, decoded);
    if (side == KvSide::kK && view_.HasKOffset()) {
      std::vector<float> offset(shape_.head_dim);
      DecodeKOffset(view_, Block(token), head, offset.data());
      std::transform(offset.begin(), offset.end(), decoded, decoded, std::plus<>());
    }
  }

  uint8_t* PayloadRow(KvSide side, int head, int token) {
    return reinterpret_cast<uint8_t*>(view_.Payload(side, Block(token), head) +
                                      Slot(token) * view_.row_bytes[static_cast<int>(side)]);
  }
  uint8_t* Metadata(KvSide side, int head, int token) {
    const int s = static_cast<int>(side);
    std::byte* at = nullptr;
    if (view_.scale_bytes[s] > 0) {
      at = view_.Scales(side, Block(token), head) + Slot(token) * view_.ScaleStride();
    } else if (view_.param_bytes[s] > 0) {
      at = view_.Params(side, Block(token), head) + Slot(token) * view_.param_bytes[s];
    }
    return reinterpret_cast<uint8_t*>(at);
  }
  float GlobalScale(KvSide side, int head) const {
    const float* global_scale = view_.global_scale[static_cast<int>(side)];
    return global_scale != nullptr ? global_scale[head] : 1.f;
  }
  float* Decoded(KvSide side, int head, int token) {
    return decoded_[static_cast<int>(side)].data() +
           (static_cast<int64_t>(head) * shape_.context + token) * shape_.head_dim;
  }
  const CacheShape& shape() const { return shape_; }
  const KvLayerView& view() const { return view_; }
  std::vector<int32_t>& table() { return table_; }
  std::vector<std::byte>& data() { return data_; }
  std::vector<std::byte>& scales() { return scales_; }

 private:
  static block::Config MakeConfig(const CacheShape& shape) {
    block::Config config;
    config.layers = {{shape.k, shape.v}};
    config.kv_heads = shape.kv_heads;
    config.head_dim = shape.head_dim;
    config.block_seq_len = shape.block_seq_len;
    config.dtype = shape.dtype;
    config.k_offset = shape.k_offset;
    return config;
  }
  int64_t Block(int token) const { return table_[token / shape_.block_seq_len]; }
  int64_t Slot(int token) const { return token % shape_.block_seq_len; }

  CacheShape shape_;
  block::Layout layout_;
  std::mt19937 random_;
  int64_t num_blocks_ = 0;
  std::vector<std::byte> data_;
  std::vector<std::byte> scales_;
  std::vector<int32_t> table_;
  std::vector<float> global_scales_[2];
  std::vector<float> decoded_[2];
  KvLayerView view_;
};

}  // namespace turbomind
