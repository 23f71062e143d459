#pragma once

// Measures attention over latents for one shape, on any device, as kv_cells.h measures other
// attention.

#include <cmath>
#include <string>
#include <vector>

#include "bench_device.h"
#include "kv_cells.h"
#include "turbomind/ops/latent.h"

namespace turbomind::bench {

struct LatentShape {
  explicit LatentShape(Cell& cell)
      : format(GetKvCacheMode(cell.Text("mode", "none"), DeviceCapability())),
        batch(cell.Number("batch", 1)),
        context(cell.Number("context", 1024)),
        new_tokens(cell.Number("new_tokens", 1)),
        heads(cell.Number("heads", 16)),
        rank(cell.Number("rank", kMaxLatentDim)),
        rotary(cell.Number("rotary", 64)) {
    if (batch < 1 || new_tokens < 1 || context < new_tokens || heads < 1) {
      throw std::invalid_argument("Sizes must be positive, and new_tokens at most context.");
    }
  }

  int64_t num_tokens() const { return int64_t{batch} * new_tokens; }
  int blocks_of_context() const { return CeilDiv(context, kBlockTokens); }
  int first_visible_block() const { return 0; }

  KvCacheMode format;
  int batch;
  int context;  // tokens of each sequence, including the new ones
  int new_tokens;
  int heads;
  int rank;
  int rotary;
};

inline block::Config ConfigOf(const LatentShape& shape, int layers) {
  block::Config config;
  config.layers.assign(static_cast<size_t>(layers), {KvCacheMode::kNone, shape.format});
  config.kv_heads = 1;
  config.head_dim = shape.rank;
  config.rotary_dim = shape.rotary;
  config.block_seq_len = kBlockTokens;
  return config;
}

// Filled pools of some layers and the parameters of attention.
class LatentBench {
 public:
  LatentBench(Device& device, const LatentShape& shape, const Limits& limits)
      : device_(device),
        shape_(shape),
        blocks_(int64_t{shape.batch} * shape.blocks_of_context()),
        layout_(ConfigOf(shape, limits.LayersFor(LayerBytes()))),
        launches_(limits.LaunchesFor(LayerBytes())),
        data_(device, static_cast<size_t>(blocks_ * layout_.block_bytes())),
        scales_(device, static_cast<size_t>(blocks_ * layout_.scale_block_bytes())),
        host_(shape, blocks_),
        q_(device, RandomValues(kPeriodValues, 2),
           shape.num_tokens() * shape.heads * (shape.rank + shape.rotary)),
        out_(device,
             static_cast<size_t>(shape.num_tokens() * shape.heads * shape.rank) * sizeof(float)),
        group_({.batch = host_.batch, .kv_heads = 1}) {
    FillPools(device, layout_, data_, &scales_);
  }

  int launches() const { return launches_; }
  int layers() const { return static_cast<int>(layout_.config().layers.size()); }

  // Positions that some query sees count once for their sequence.
  OpCost Cost() const {
    const int64_t rows = int64_t{shape_.batch} * shape_.context;
    const double row_bytes = layout_.bytes_per_token() / layers();
    return {.kv_bytes = static_cast<int64_t>(static_cast<double>(rows) * row_bytes),
            .activation_bytes = static_cast<int64_t>(q_.num_bytes() + out_.num_bytes())};
  }

  void RunStep() {
    device_.RunStep({.tokens = host_.tokens.data(),
                     .groups = &group_,
                     .num_groups = 1,
                     .q_heads = shape_.heads},
                    [&] {
                      for (int i = 0; i < launches_; ++i) {
                        invokeLatentAttention(device_, Params(i));
                      }
                    });
  }

 private:
  LatentAttentionParams Params(int launch) const {
    const int64_t q_values = shape_.num_tokens() * shape_.heads * shape_.rank;
    return {
        .q = q_.As<float>(),
        .q_stride = int64_t{shape_.heads} * shape_.rank,
        .q_rotary = q_.As<float>() + q_values,
        .q_rotary_stride = int64_t{shape_.heads} * shape_.rotary,
        .q_rotary_head_stride = shape_.rotary,
        .out = out_.As<float>(),
        .q_heads = shape_.heads,
        .softmax_scale = 1.f / std::sqrt(static_cast<float>(shape_.rank + shape_.rotary)),
        .kv = layout_.LayerView(launch % layers(), data_.As<std::byte>(), scales_.As<std::byte>()),
        .batch = host_.batch};
  }
  int64_t LayerBytes() const {
    const block::Layout one(ConfigOf(shape_, 1));
    return blocks_ * (one.block_bytes() + one.scale_block_bytes());
  }

  Device& device_;
  LatentShape shape_;
  int64_t blocks_;
  block::Layout layout_;
  int launches_;
  DeviceBuffer data_;
  DeviceBuffer scales_;
  StepArraysOnHost host_;
  DeviceBuffer q_;
  DeviceBuffer out_;
  StepGroup group_;
};

inline Measured MeasureLatents(Device& device, const LatentShape& shape, const Limits& limits) {
  LatentBench bench(device, shape, limits);
  const Timing timing =
      Measure(device, bench.launches(), limits.round_seconds, [&] { bench.RunStep(); });
  return {timing, bench.Cost(), bench.layers()};
}

}  // namespace turbomind::bench
