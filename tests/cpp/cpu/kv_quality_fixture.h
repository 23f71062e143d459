#pragma once

// One layer with its quantized pool and its 16-bit pool, and the ops of a step over them, for the
// tests of rotation, means, the search for scales and the 16-bit window.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cpu/kv_fixture.h"
#include "turbomind/backend/cpu/cpu_device.h"
#include "turbomind/ops/attention.h"
#include "turbomind/ops/flatten_kv.h"
#include "turbomind/ops/process_kv.h"
#include "turbomind/ops/quantize_blocks.h"

namespace turbomind::kv_quality {

inline constexpr int kQHeads = 4;
inline constexpr int kHeads = 2;
inline constexpr int kGroup = kQHeads / kHeads;
inline constexpr int kAllHeads = kQHeads + 2 * kHeads;
inline constexpr PrecisionWindowTokens kBalanced = {64, 64};

inline std::vector<float> RandomRow(std::mt19937& random, size_t n, float mean = 0.f) {
  std::normal_distribution<float> normal(mean);
  std::vector<float> row(n);
  for (float& x : row) {
    x = normal(random);
  }
  return row;
}

// One sequence: the rows of Q, K and V before any transformation, for `context` tokens.
struct Sequence {
  Sequence(const CacheShape& shape, unsigned seed) : dim(shape.head_dim) {
    std::mt19937 random(seed);
    qkv = RandomRow(random, static_cast<size_t>(shape.context) * kAllHeads * dim);
    mean = RandomRow(random, static_cast<size_t>(kHeads) * dim, 2.f);
    sinks = RandomRow(random, kQHeads);
    q_dot_mean.assign(static_cast<size_t>(shape.context) * kQHeads, -1.f);
    positions.resize(static_cast<size_t>(shape.context));
    std::iota(positions.begin(), positions.end(), 0);
  }
  float* Row(int token, int head) {
    return qkv.data() + (static_cast<int64_t>(token) * kAllHeads + head) * dim;
  }

  int dim;
  std::vector<float> qkv;
  std::vector<float> mean;
  std::vector<float> sinks;
  std::vector<float> q_dot_mean;
  std::vector<int32_t> positions;
};

struct Ingredients {
  bool rotate = false;
  bool search = false;
  bool mean = false;
  PrecisionWindowTokens window16;
  KvCacheMode window_format = KvCacheMode::kNone;
  bool k_offset = false;
  bool k_bias = false;  // the written pool has K offsets, from a bias of BiasOf(channel)
  // Changes the parameters of a write whose first token is at a position.
  std::function<void(WriteKvParams&, int)> adjust_write = {};
};

inline float BiasOf(int channel) { return channel % 3 == 0 ? 20.f : -10.f; }

// The empty quantized pool and 16-bit pool of one layer, and the ops of one step over them.
class Layer {
 public:
  Layer(const CacheShape& shape, const Ingredients& with, const std::string& isa = "")
      : with_(with),
        rule_(MakePrecisionWindow(with.window16, shape.block_seq_len)),
        device_(MakeCpuDevice(2, isa)),
        quantized_(QuantizedShape(shape, with), 0xff),
        window16_(Window16Shape(shape, with), 0xff),
        k_base_(static_cast<size_t>(kHeads) * shape.head_dim) {
    for (size_t i = 0; i < k_base_.size(); ++i) {
      k_base_[i] = BiasOf(static_cast<int>(i) % shape.head_dim);
    }
    std::fill(quantized_.data().begin(), quantized_.data().end(), std::byte{0xff});
    std::fill(quantized_.scales().begin(), quantized_.scales().end(), std::byte{0xff});
    std::fill(window16_.data().begin(), window16_.data().end(), std::byte{0xff});
    window16_table_.assign(window16_.table().size(), -1);
    quantized_table_ =
        rule_.enabled() ? std::vector<int32_t>(quantized_.table().size(), -1) : quantized_.table();
  }

  // Runs tokens [begin, end) as one step: write, quantize, attend. The tables hold only the blocks
  // that the step needs. Returns the output of the attention.
  std::vector<float> Step(Sequence& sequence, int begin, int end) {
    const int32_t cu_seqlens[2] = {0, end - begin};
    const int32_t context = end;
    const std::vector<PendingQuantization> blocks_to_quantize = Plan(begin, end);
    BatchView batch = {1,        end - begin == 1 ? 1 : 0,         end - begin, cu_seqlens,
                       &context, sequence.positions.data() + begin};
    batch.block_tables = quantized_table_.data();
    batch.window16_tables = rule_.enabled() ? window16_table_.data() : nullptr;
    batch.block_table_stride = static_cast<int64_t>(quantized_table_.size());
    batch.blocks_to_quantize = blocks_to_quantize.data();
    batch.num_to_quantize = static_cast<int>(blocks_to_quantize.size());
    Write(sequence, begin, batch);
    if (rule_.enabled()) {
      QuantizeBlocksParams p;
      p.kv = quantized_.view();
      p.window16 = window16_.view();
      p.search_scales = with_.search;
      p.blocks_to_quantize = batch.blocks_to_quantize;
      p.num_to_quantize = batch.num_to_quantize;
      p.num_clipped = &num_clipped_;
      invokeQuantizeBlocks(*device_, p);
    }
    const std::vector<float> out = Attend(sequence, begin, batch);
    Release(blocks_to_quantize);
    return out;
  }

  void Flatten(std::vector<float>& k, std::vector<float>& v, const int32_t& context) {
    const CacheShape& shape = quantized_.shape();
    static const int32_t cu_seqlens[2] = {0, 1};
    const size_t size = static_cast<size_t>(kHeads) * context * shape.head_dim;
    k.assign(size, -1.f);
    v.assign(size, -1.f);
    last_ = context - 1;
    FlattenKVParams f;
    f.k = k.data();
    f.v = v.data();
    f.max_len = context;
    f.kv = quantized_.view();
    f.batch = {1, 1, 1, cu_seqlens, &context, &last_};
    f.batch.block_tables = quantized_table_.data();
    f.batch.block_table_stride = static_cast<int64_t>(quantized_table_.size());
    if (rule_.enabled()) {
      f.window16 = window16_.view();
      f.rule = rule_;
      f.batch.window16_tables = window16_table_.data();
    }
    invokeFlattenKV_v2(*device_, f);
  }

  const PrecisionWindow& rule() const { return rule_; }
  TestCache& quantized() { return quantized_; }
  TestCache& window16() { return window16_; }
  int64_t num_nonfinite() const { return num_nonfinite_; }
  int64_t num_clipped() const { return num_clipped_; }

 private:
  static CacheShape QuantizedShape(CacheShape shape, const Ingredients& with) {
    shape.k_offset = with.k_offset && (with.window16.recent_tokens >= 0 || with.k_bias);
    return shape;
  }
  static CacheShape Window16Shape(CacheShape shape, const Ingredients& with) {
    shape.k = shape.v = with.window_format;
    shape.k_offset = with.k_offset && with.k_bias;
    shape.first_block = 2;
    return shape;
  }

  // Allocates 16-bit blocks for the new tokens. Returns the blocks that leave the recent window of
  // the last query.
  std::vector<PendingQuantization> Plan(int begin, int end) {
    std::vector<PendingQuantization> blocks_to_quantize;
    if (!rule_.enabled()) {
      return blocks_to_quantize;
    }
    const int length = rule_.block_seq_len;
    for (int block = begin / length; block * length < end; ++block) {
      window16_table_[static_cast<size_t>(block)] = window16_.table()[static_cast<size_t>(block)];
    }
    for (int block = rule_.sink_blocks; block * length < rule_.RecentBegin(end - 1); ++block) {
      const auto i = static_cast<size_t>(block);
      if (quantized_table_[i] < 0) {
        quantized_table_[i] = quantized_.table()[i];
        blocks_to_quantize.push_back({window16_table_[i], quantized_table_[i]});
      }
    }
    return blocks_to_quantize;
  }

  void Write(Sequence& sequence, int begin, const BatchView& batch) {
    WriteKvParams p;
    p.qkv = sequence.Row(begin, 0);
    p.q_heads = kQHeads;
    p.rotate = with_.rotate;
    p.search_scales = with_.search;
    p.k_mean = with_.mean ? sequence.mean.data() : nullptr;
    p.q_dot_mean = sequence.q_dot_mean.data() + static_cast<int64_t>(begin) * kQHeads;
    p.kv = quantized_.view();
    p.batch = batch;
    if (rule_.enabled()) {
      p.window16 = window16_.view();
    }
    const KvLayerView& written = rule_.enabled() ? window16_.view() : quantized_.view();
    p.k_base = written.HasKOffset() ? k_base_.data() : nullptr;
    p.num_nonfinite = &num_nonfinite_;
    p.num_clipped = &num_clipped_;
    if (with_.adjust_write) {
      with_.adjust_write(p, begin);
    }
    invokeProcessKV_v2(*device_, p);
  }

  std::vector<float> Attend(Sequence& sequence, int begin, const BatchView& batch) {
    const int64_t row = static_cast<int64_t>(kQHeads) * sequence.dim;
    std::vector<float> out(static_cast<size_t>(batch.num_tokens * row), -1.f);
    AttentionParams p;
    p.q = sequence.Row(begin, 0);
    p.q_stride = static_cast<int64_t>(kAllHeads) * sequence.dim;
    p.out = out.data();
    p.q_heads = kQHeads;
    p.softmax_scale = 1.f / std::sqrt(static_cast<float>(sequence.dim));
    p.sinks = sequence.sinks.data();
    p.q_dot_mean =
        with_.mean ? sequence.q_dot_mean.data() + static_cast<int64_t>(begin) * kQHeads : nullptr;
    p.kv = quantized_.view();
    p.rule = rule_;
    if (rule_.enabled()) {
      p.window16 = window16_.view();
    }
    p.batch = batch;
    dispatchDecoding(*device_, p);
    invokePrefillAttention(*device_, p);
    return out;
  }

  // Frees the 16-bit blocks after they are quantized. Their old contents must have no effect.
  void Release(const std::vector<PendingQuantization>& blocks_to_quantize) {
    for (const PendingQuantization& pending : blocks_to_quantize) {
      std::fill_n(window16_.view().data + pending.window16 * window16_.view().block_bytes,
                  window16_.view().block_bytes, std::byte{0xff});
      std::replace(window16_table_.begin(), window16_table_.end(), pending.window16, -1);
    }
  }

  Ingredients with_;
  PrecisionWindow rule_;
  std::unique_ptr<Device> device_;
  TestCache quantized_;
  TestCache window16_;
  std::vector<float> k_base_;
  std::vector<int32_t> quantized_table_;
  std::vector<int32_t> window16_table_;
  int64_t num_nonfinite_ = 0;
  int64_t num_clipped_ = 0;
  int32_t last_ = 0;
};

inline std::vector<float> RunSteps(Layer& layer, Sequence& sequence, int context, int chunk) {
  std::vector<float> out;
  for (int begin = 0; begin < context; begin += chunk) {
    const std::vector<float> step = layer.Step(sequence, begin, std::min(context, begin + chunk));
    out.insert(out.end(), step.begin(), step.end());
  }
  return out;
}

inline bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

inline CacheShape Shape(KvCacheMode format, int dim, int block = 64, int context = 300) {
  CacheShape shape;
  shape.k = shape.v = format;
  shape.head_dim = dim;
  shape.kv_heads = kHeads;
  shape.block_seq_len = block;
  shape.context = context;
  return shape;
}

}  // namespace turbomind::kv_quality
