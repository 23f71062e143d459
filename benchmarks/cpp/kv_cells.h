#pragma once

// Measures ops over the KV cache of some layers for one shape. Every sequence has its own blocks.
// All blocks hold the same random rows, each at its own address. The launches of a step cycle
// through the layers, so that no launch finds its bytes in a cache.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "bench_device.h"
#include "turbomind/core/ceil_div.h"
#include "turbomind/kv/codec.h"
#include "turbomind/kv/k_offset.h"
#include "turbomind/kv/layout.h"
#include "turbomind/profile/op_cost.h"

namespace turbomind::bench {

constexpr int kMaxLaunches = 256;
constexpr int kMinLayers = 2;

struct Limits {
  int launches = 24;         // the minimum number in a step
  int64_t rotate_bytes = 0;  // the minimum size of all layers together
  double round_seconds = 0.02;

  int LaunchesFor(int64_t layer_bytes) const {
    return static_cast<int>(std::clamp<int64_t>(CeilDiv(rotate_bytes, layer_bytes), launches,
                                                std::max(launches, kMaxLaunches)));
  }
  int LayersFor(int64_t layer_bytes, int least = kMinLayers) const {
    return static_cast<int>(std::clamp<int64_t>(CeilDiv(rotate_bytes, layer_bytes), least,
                                                std::max(least, LaunchesFor(layer_bytes))));
  }
};

constexpr int kBlockTokens = 64;
constexpr int64_t kPeriodValues = int64_t{1} << 18;  // random values of an activation; they repeat
constexpr float kNormEps = 1e-6f;

struct KvShape {
  explicit KvShape(Cell& cell)
      : format(GetKvCacheMode(cell.Text("mode", "none"), DeviceCapability())),
        batch(cell.Number("batch", 1)),
        context(cell.Number("context", 1024)),
        new_tokens(cell.Number("new_tokens", 1)),
        kv_heads(cell.Number("kv_heads", 8)),
        group(cell.Number("group", 8)),
        head_dim(cell.Number("head_dim", 128)),
        window(cell.Number("window", 0)),
        sinks(cell.Number("sinks", 0) != 0),
        search(cell.Number("search", 0) != 0),
        rotate(cell.Number("rotate", 0) != 0),
        k_offset(cell.Number("k_offset", 0) != 0),
        fast_pairs(cell.Number("fast_pairs", 0)),
        window_format(GetKvCacheMode(cell.Text("window_format", "none"), DeviceCapability())) {
    if (batch < 1 || new_tokens < 1 || context < new_tokens || kv_heads < 1 || group < 1) {
      throw std::invalid_argument("Sizes must be positive, and new_tokens at most context.");
    }
    if (fast_pairs < 0 || fast_pairs > kMaxFastPairs) {
      throw std::invalid_argument("fast_pairs must be 0 to 16.");
    }
  }

  int q_heads() const { return kv_heads * group; }
  int64_t num_tokens() const { return int64_t{batch} * new_tokens; }
  int64_t wave_positions() const { return int64_t{blocks_of_context()} * kBlockTokens; }
  int blocks_of_context() const { return CeilDiv(context, kBlockTokens); }
  int first_visible_block() const {
    return window == 0 ? 0 : std::max(0, context - new_tokens + 1 - window) / kBlockTokens;
  }

  KvCacheMode format;
  int batch;
  int context;  // tokens of each sequence, including the new ones
  int new_tokens;
  int kv_heads;
  int group;
  int head_dim;
  int window;
  bool sinks;
  bool search;
  bool rotate;
  bool k_offset;
  int fast_pairs;
  KvCacheMode window_format;  // of the window that op=quantize reads
};

inline block::Config ConfigOf(const KvShape& shape, int layers) {
  block::Config config;
  config.layers.assign(static_cast<size_t>(layers), {shape.format, shape.format});
  config.kv_heads = shape.kv_heads;
  config.head_dim = shape.head_dim;
  config.block_seq_len = kBlockTokens;
  config.k_offset = shape.k_offset;
  return config;
}

inline block::Config WindowConfigOf(const KvShape& shape, int layers) {
  block::Config config = ConfigOf(shape, layers);
  config.layers.assign(static_cast<size_t>(layers), {shape.window_format, shape.window_format});
  config.k_offset = false;
  return config;
}

inline std::vector<float> RandomValues(int64_t size, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(size));
  std::generate(values.begin(), values.end(), [&] { return normal(random); });
  return values;
}

// Writes random rows into layer 0 of a block on the host.
inline void WriteRows(const KvLayerView& view) {
  const std::vector<float> values =
      RandomValues(int64_t{2} * view.kv_heads * view.block_seq_len * view.head_dim, 1);
  const float* row = values.data();
  for (int side = 0; side < 2; ++side) {
    const auto s = static_cast<KvSide>(side);
    const int dim = view.Dim(s);
    for (int head = 0; head < view.kv_heads; ++head) {
      for (int token = 0; token < view.block_seq_len; ++token, row += dim) {
        const KvRow to = view.Row(s, 0, head, token);
        DispatchFormat(view.format[side], [&]<KvCacheMode M>() {
          Codec<M>::EncodeRow(row, dim, view.dtype, 1.f, to.payload, to.metadata);
        });
      }
    }
  }
  for (int head = 0; view.HasKOffset() && head < view.kv_heads; ++head) {
    const KvRow to = view.KOffset(0, head);
    KOffsetCodec::EncodeRow(values.data() + head * view.head_dim, view.head_dim, view.dtype, 1.f,
                            to.payload, to.metadata);
  }
}

// The arrays of a step on the host.
struct StepArraysOnHost {
  std::vector<int32_t> tokens, cu_seqlens, context_lens, positions, table;
  std::vector<PendingQuantization> blocks_to_quantize;  // as many as hold the new tokens
  BatchView batch;

  // `shape` is a KvShape or a LatentShape.
  template <class Shape>
  StepArraysOnHost(const Shape& shape, int64_t num_blocks) {
    constexpr int64_t kScatter =
        7919;  // a prime: consecutive blocks of a sequence have distant addresses
    const int first = shape.first_visible_block();
    int64_t next = 0;
    for (int i = 0; i < shape.batch; ++i) {
      cu_seqlens.push_back(i * shape.new_tokens);
      context_lens.push_back(shape.context);
      for (int t = 0; t < shape.new_tokens; ++t) {
        positions.push_back(shape.context - shape.new_tokens + t);
      }
      for (int block = 0; block < shape.blocks_of_context(); ++block) {
        const int64_t id = num_blocks % kScatter == 0 ? next : next * kScatter % num_blocks;
        table.push_back(block < first ? -1 : static_cast<int32_t>(id));
        next += block < first ? 0 : 1;
      }
    }
    cu_seqlens.push_back(static_cast<int32_t>(shape.num_tokens()));
    tokens.assign(positions.size(), 0);
    const int64_t num_leaving = CeilDiv(shape.num_tokens(), int64_t{kBlockTokens});
    for (int i = 0; i < static_cast<int>(std::min(num_leaving, num_blocks)); ++i) {
      blocks_to_quantize.push_back({i, i});
    }
    batch = {.num_seqs = shape.batch,
             .num_decode = shape.new_tokens == 1 ? shape.batch : 0,
             .num_tokens = static_cast<int>(shape.num_tokens()),
             .cu_seqlens = cu_seqlens.data(),
             .context_lens = context_lens.data(),
             .positions = positions.data(),
             .block_tables = table.data(),
             .block_table_stride = shape.blocks_of_context(),
             .blocks_to_quantize = blocks_to_quantize.data(),
             .num_to_quantize = static_cast<int>(blocks_to_quantize.size())};
  }
};

// Fills all blocks with the same rows, which are equal in all layers. `scales` may be null.
inline void FillPools(Device& device, const block::Layout& layout, DeviceBuffer& data,
                      DeviceBuffer* scales) {
  std::vector<std::byte> data_block(static_cast<size_t>(layout.block_bytes()));
  std::vector<std::byte> scale_block(static_cast<size_t>(layout.scale_block_bytes()));
  WriteRows(
      layout.LayerView(0, data_block.data(), scale_block.empty() ? nullptr : scale_block.data()));
  const size_t layers = layout.config().layers.size();
  for (const auto& [pool, block] :
       {std::pair(&data, &data_block), std::pair(scales, &scale_block)}) {
    const size_t part = block->size() / layers;
    for (size_t i = 1; i < layers; ++i) {
      std::memcpy(block->data() + i * part, block->data(), part);
    }
    if (!block->empty()) {
      device.Copy(pool->As<std::byte>(), block->data(), block->size());
      pool->Repeat(block->size());
    }
  }
}

// Filled pools of some layers and the parameters of the ops of one shape.
class KvBench {
 public:
  KvBench(Device& device, const KvShape& shape, const Limits& limits, int least_layers = kMinLayers)
      : device_(device),
        shape_(shape),
        blocks_(int64_t{shape.batch} * (shape.blocks_of_context() - shape.first_visible_block())),
        launches_(limits.LaunchesFor(LayerBytes())),
        layout_(ConfigOf(shape, limits.LayersFor(LayerBytes(), least_layers))),
        data_(device, static_cast<size_t>(blocks_ * layout_.block_bytes())),
        scales_(device, static_cast<size_t>(blocks_ * layout_.scale_block_bytes())),
        host_(shape, blocks_),
        qkv_(device, RandomValues(kPeriodValues, 2), shape.num_tokens() * Heads() * shape.head_dim),
        out_(device, static_cast<size_t>(shape.num_tokens() * shape.q_heads() * shape.head_dim) *
                         sizeof(float)),
        sinks_(device, RandomValues(shape.q_heads(), 3)),
        angles_(device, std::vector<float>{std::sqrt(0.5f)},
                shape.num_tokens() * shape.head_dim / 2),
        directions_(device, RandomValues(kPeriodValues, 4),
                    int64_t{2} * shape.kv_heads * shape.fast_pairs * shape.head_dim),
        waves_(device, RandomValues(kPeriodValues, 5),
               2 * shape.fast_pairs * shape.wave_positions()),
        waves_of_(device, WavesOf(shape)),
        num_nonfinite_(device, sizeof(int64_t)) {
    FillPools(device, layout_, data_, &scales_);
    for (size_t i = 0; i < layout_.config().layers.size(); ++i) {
      views_.push_back(
          layout_.LayerView(static_cast<int>(i), data_.As<std::byte>(), scales_.As<std::byte>()));
    }
    group_ = {.batch = host_.batch, .window = shape.window, .kv_heads = shape.kv_heads};
  }

  int launches() const { return launches_; }
  int layers() const { return static_cast<int>(views_.size()); }

  AttentionParams Attention(int launch) const {
    AttentionParams p;
    p.q = qkv_.As<float>();
    p.q_stride = Heads() * shape_.head_dim;
    p.out = out_.As<float>();
    p.q_heads = shape_.q_heads();
    p.softmax_scale = 1.f / std::sqrt(static_cast<float>(shape_.head_dim));
    p.window = shape_.window;
    p.sinks = shape_.sinks ? sinks_.As<float>() : nullptr;
    p.fast_bias = {.num_pairs = shape_.fast_pairs,
                   .directions = directions_.As<float>(),
                   .waves_of = waves_of_.As<int32_t>(),
                   .waves = waves_.As<float>(),
                   .num_positions = shape_.wave_positions()};
    p.kv = View(launch);
    p.batch = host_.batch;
    return p;
  }
  WriteKvParams Write(int launch) const {
    WriteKvParams p;
    p.qkv = qkv_.As<float>();
    p.norm_eps = kNormEps;
    p.rope_cos = angles_.As<float>();
    p.rope_sin = angles_.As<float>();
    p.rope_dim = shape_.head_dim;
    p.q_heads = shape_.q_heads();
    p.rotate = shape_.rotate;
    p.search_scales = shape_.search;
    p.kv = View(launch);
    p.batch = host_.batch;
    p.num_nonfinite = num_nonfinite_.As<int64_t>();
    return p;
  }
  FlattenKVParams Flatten(int launch, const DeviceBuffer& dense) const {
    FlattenKVParams p;
    p.k = dense.As<float>();
    p.v = p.k + dense.num_bytes() / (2 * sizeof(float));
    p.max_len = shape_.context;
    p.kv = View(launch);
    p.batch = host_.batch;
    return p;
  }
  // Returns the layout of the window that blocks leave.
  block::Layout WindowLayout() const { return block::Layout(WindowConfigOf(shape_, layers())); }
  int64_t num_leaving() const { return host_.batch.num_to_quantize; }
  QuantizeBlocksParams Quantize(int launch, const block::Layout& layout,
                                const DeviceBuffer& window) const {
    QuantizeBlocksParams p;
    p.kv = View(launch);
    p.window16 = layout.LayerView(launch % layers(), window.As<std::byte>(), nullptr);
    p.search_scales = shape_.search;
    p.blocks_to_quantize = host_.batch.blocks_to_quantize;
    p.num_to_quantize = host_.batch.num_to_quantize;
    return p;
  }
  size_t dense_bytes() const {
    return static_cast<size_t>(int64_t{2} * shape_.batch * shape_.kv_heads * shape_.context *
                               shape_.head_dim) *
           sizeof(float);
  }

  // Runs one step that calls launch(i) for every i below launches().
  template <class F>
  void RunStep(F launch) {
    device_.RunStep({.tokens = host_.tokens.data(),
                     .groups = &group_,
                     .num_groups = 1,
                     .q_heads = shape_.q_heads()},
                    [&] {
                      for (int i = 0; i < launches_; ++i) {
                        launch(i);
                      }
                    });
  }

 private:
  static std::vector<int32_t> WavesOf(const KvShape& shape) {
    std::vector<int32_t> waves_of;
    for (int i = 0; i < shape.kv_heads * shape.fast_pairs; ++i) {
      waves_of.push_back(i % shape.fast_pairs);
    }
    return waves_of;
  }
  int64_t Heads() const { return int64_t{shape_.q_heads()} + 2 * shape_.kv_heads; }
  const KvLayerView& View(int launch) const {
    return views_[static_cast<size_t>(launch) % views_.size()];
  }
  int64_t LayerBytes() const {
    const block::Layout one(ConfigOf(shape_, 1));
    return blocks_ * (one.block_bytes() + one.scale_block_bytes());
  }

  Device& device_;
  KvShape shape_;
  int64_t blocks_;
  int launches_;
  block::Layout layout_;
  DeviceBuffer data_;
  DeviceBuffer scales_;
  StepArraysOnHost host_;
  DeviceBuffer qkv_;
  DeviceBuffer out_;
  DeviceBuffer sinks_;
  DeviceBuffer angles_;
  DeviceBuffer directions_;  // of FastBias
  DeviceBuffer waves_;
  DeviceBuffer waves_of_;
  DeviceBuffer num_nonfinite_;
  std::vector<KvLayerView> views_;
  StepGroup group_;
};

struct Measured {
  Timing timing;
  OpCost cost;  // of one launch
  int layers = 1;
};

inline Measured MeasureKv(Device& device, const std::string& op, const KvShape& shape,
                          const Limits& limits) {
  KvBench bench(device, shape, limits);
  const auto measure = [&](const OpCost& cost, auto launch) {
    const Timing timing =
        Measure(device, bench.launches(), limits.round_seconds, [&] { bench.RunStep(launch); });
    return Measured{timing, cost, bench.layers()};
  };
  if (op == "decode") {
    return measure(DecodeCost(bench.Attention(0)),
                   [&](int i) { device.DecodeAttention(bench.Attention(i)); });
  }
  if (op == "prefill") {
    return measure(PrefillCost(bench.Attention(0)),
                   [&](int i) { device.PrefillAttention(bench.Attention(i)); });
  }
  if (op == "write") {
    return measure(CostOf(bench.Write(0)), [&](int i) { device.WriteKv(bench.Write(i)); });
  }
  if (op == "quantize") {
    const block::Layout layout = bench.WindowLayout();
    DeviceBuffer window(device, static_cast<size_t>(bench.num_leaving() * layout.block_bytes()));
    FillPools(device, layout, window, nullptr);
    return measure(CostOf(bench.Quantize(0, layout, window)),
                   [&](int i) { device.QuantizeBlocks(bench.Quantize(i, layout, window)); });
  }
  const DeviceBuffer dense(device, bench.dense_bytes());
  return measure(CostOf(bench.Flatten(0, dense)),
                 [&](int i) { device.FlattenKV(bench.Flatten(i, dense)); });
}

}  // namespace turbomind::bench
