// Tests the KV cache ops through the Device interface that the engine uses: prefill and decode
// steps in every format, on the GPU and on the CPU. Both must store the same bytes.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "cuda/both_devices.h"
#include "turbomind/core/ceil_div.h"
#include "turbomind/kv/layout.h"

namespace turbomind::testing {
namespace {

// Relative to the output's norm. The GPU rounds queries, softmax weights and values to 16 bits.
// FP16 has 11 significant bits; BF16, used for a BF16 cache that is not quantized, has 8.
constexpr double kMaxError = 2e-3;
constexpr double kMaxErrorBFloat = 8e-3;

constexpr int kBlockTokens = 16;
constexpr int kRecentTokens = 64;
constexpr int kTokensOfPrompt = 21;

struct KvCase {
  KvCacheMode k = KvCacheMode::kNone;
  KvCacheMode v = KvCacheMode::kNone;
  DataType dtype = DataType::kBFloat16;
  int head_dim = 64;
  int kv_heads = 2;
  int group = 2;
  int window = 0;
  bool sinks = false;
  bool window16 = false;  // first and newest tokens in a window
  KvCacheMode window_format = KvCacheMode::kNone;
  bool k_offset = false;   // of blocks that leave the window
  bool k_base = false;     // and of blocks that are written
  bool as_served = false;  // rotation, scale search and a mean of K
  float score_cap = 0.f;
  std::vector<int> contexts = {210, 35, 150};  // before the first step
};

std::string Describe(const KvCase& c) {
  return std::string(ToString(c.k)) + " / " + ToString(c.v) + ", " + ToString(c.dtype) +
         ", head_dim " + std::to_string(c.head_dim) + ", window " + std::to_string(c.window) +
         (c.window16 ? std::string(", window in ") + ToString(c.window_format) : "") +
         (c.k_offset ? ", K offset" : "") + (c.k_base ? " also from a bias" : "") +
         (c.as_served ? ", as served" : "");
}

block::Layout LayoutOf(const KvCase& c, bool window16) {
  block::Config config;
  config.layers = {window16 ? block::Config::LayerFormats{c.window_format, c.window_format}
                            : block::Config::LayerFormats{c.k, c.v}};
  config.k_offset = c.k_offset && (c.k_base || !window16);
  config.kv_heads = c.kv_heads;
  config.head_dim = c.head_dim;
  config.block_seq_len = kBlockTokens;
  config.dtype = c.dtype;
  return block::Layout(config);
}

// The pools of one layer on both devices, and sequences that grow step by step.
class Layer {
 public:
  Layer(Devices& devices, const KvCase& c)
      : devices_(devices),
        case_(c),
        quantized_(LayoutOf(c, false)),
        warm_(LayoutOf(c, true)),
        blocks_(4 + static_cast<int>(CeilDiv(c.contexts[0], kBlockTokens))),
        data_(devices, Zeros(quantized_.block_bytes())),
        scales_(devices, Zeros(std::max<int64_t>(16, quantized_.scale_block_bytes()))),
        window16_(devices, Zeros(warm_.block_bytes())),
        bias_(devices, Normal(Row(), 1)),
        norm_(devices, Normal(static_cast<size_t>(c.head_dim), 2, 0.1f)),
        mean_(devices, Normal(static_cast<size_t>(c.kv_heads * c.head_dim), 3)),
        base_(devices, Normal(static_cast<size_t>(c.kv_heads * c.head_dim), 5)),
        sinks_(devices, Normal(static_cast<size_t>(q_heads()), 4)),
        global_scales_(devices, std::vector<float>(static_cast<size_t>(c.kv_heads), 0.75f)),
        num_nonfinite_(devices, {0}),
        qkv_(devices, Unwritten(max_tokens() * Row())),
        dot_(devices, Unwritten(max_tokens() * static_cast<size_t>(q_heads()))),
        out_(devices, Unwritten(max_tokens() * Width())),
        dense_(devices, Unwritten(2 * c.contexts.size() * static_cast<size_t>(c.kv_heads) *
                                  static_cast<size_t>(max_positions() * c.head_dim))),
        lengths_(c.contexts.size(), 0) {}

  int q_heads() const { return case_.group * case_.kv_heads; }

  // Write and attend the next `counts[i]` tokens of sequence i. Sequences with one token come
  // first.
  void Step(const std::vector<int>& counts);
  int num_steps() const { return static_cast<int>(steps_); }
  // Number of GPU steps that ran their ops instead of replaying a graph.
  int num_runs() const { return num_runs_; }
  int num_with_pending() const { return num_with_pending_; }

 private:
  std::vector<std::byte> Zeros(int64_t block_bytes) const {
    const auto blocks = static_cast<int64_t>(case_.contexts.size()) * blocks_;
    return std::vector<std::byte>(static_cast<size_t>(block_bytes * blocks));
  }
  int max_positions() const { return blocks_ * kBlockTokens; }
  size_t max_tokens() const {
    return static_cast<size_t>(std::accumulate(case_.contexts.begin(), case_.contexts.end(), 0));
  }
  size_t Width() const { return static_cast<size_t>(q_heads() * case_.head_dim); }
  size_t Row() const {
    return static_cast<size_t>((q_heads() + 2 * case_.kv_heads) * case_.head_dim);
  }
  PrecisionWindow Rule() const {
    return case_.window16 ? MakePrecisionWindow({kRecentTokens, kRecentTokens}, kBlockTokens)
                          : PrecisionWindow();
  }
  KvLayerView View(int side) const {
    KvLayerView view = quantized_.LayerView(0, data_[side], scales_[side]);
    for (int s = 0; s < 2; ++s) {
      view.global_scale[s] = HasGlobalScale(view.format[s]) ? global_scales_[side] : nullptr;
    }
    return view;
  }
  KvLayerView Window16View(int side) const {
    return case_.window16 ? warm_.LayerView(0, window16_[side], nullptr) : KvLayerView();
  }

  struct Arrays {
    std::vector<int32_t> tokens, cu_seqlens = {0}, context_lens, positions, quantized, window16;
    std::vector<PendingQuantization> blocks_to_quantize;
    StepGroup group;
  };
  void FillArrays(const std::vector<int>& counts, Arrays& arrays);
  WriteKvParams Write(int side) const;
  AttentionParams Attention(int side) const;
  void RunOps(int side, const BatchView& batch);

  Devices& devices_;
  KvCase case_;
  block::Layout quantized_;
  block::Layout warm_;
  int blocks_;  // per sequence
  Both<std::byte> data_;
  Both<std::byte> scales_;
  Both<std::byte> window16_;
  Both<float> bias_;
  Both<float> norm_;
  Both<float> mean_;
  Both<float> base_;
  Both<float> sinks_;
  Both<float> global_scales_;
  Both<int64_t> num_nonfinite_;
  // Shared by all steps, because recorded graphs hold these addresses.
  Both<float> qkv_;
  Both<float> dot_;
  Both<float> out_;
  Both<float> dense_;
  std::vector<int> lengths_;
  unsigned steps_ = 0;
  int num_runs_ = 0;
  int num_with_pending_ = 0;
};

void Layer::FillArrays(const std::vector<int>& counts, Arrays& a) {
  int num_decode = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    const int before = lengths_[i];
    lengths_[i] += counts[i];
    num_decode += counts[i] == 1 ? 1 : 0;
    a.cu_seqlens.push_back(a.cu_seqlens.back() + counts[i]);
    a.context_lens.push_back(lengths_[i]);
    for (int p = before; p < lengths_[i]; ++p) {
      a.tokens.push_back(p);
      a.positions.push_back(p);
    }
    for (int block = 0; block < blocks_; ++block) {  // every block exists in both pools
      a.quantized.push_back(static_cast<int32_t>(i) * blocks_ + (blocks_ - 1 - block));
      a.window16.push_back(static_cast<int32_t>(i) * blocks_ + block);
    }
    const int row = static_cast<int>(i) * blocks_;
    for (int block = 0; case_.window16 && block * kBlockTokens < lengths_[i]; ++block) {
      const bool is_new = block * kBlockTokens >= before;
      if ((is_new || Rule().IsInWindow16(block, before - 1)) &&
          !Rule().IsInWindow16(block, lengths_[i] - 1)) {
        a.blocks_to_quantize.push_back({row + block, row + blocks_ - 1 - block});
      }
    }
  }
  a.group = {.batch = {.num_seqs = static_cast<int>(counts.size()),
                       .num_decode = num_decode,
                       .num_tokens = a.cu_seqlens.back(),
                       .cu_seqlens = a.cu_seqlens.data(),
                       .context_lens = a.context_lens.data(),
                       .positions = a.positions.data(),
                       .block_tables = a.quantized.data(),
                       .block_table_stride = blocks_,
                       .window16_tables = case_.window16 ? a.window16.data() : nullptr,
                       .blocks_to_quantize = a.blocks_to_quantize.data(),
                       .num_to_quantize = static_cast<int>(a.blocks_to_quantize.size())},
             .window = case_.window,
             .kv_heads = case_.kv_heads,
             .has_window16 = case_.window16,
             .rule = Rule()};
}

WriteKvParams Layer::Write(int side) const {
  return {.qkv = qkv_[side],
          .bias = bias_[side],
          .q_norm = norm_[side],
          .k_norm = norm_[side],
          .q_heads = q_heads(),
          .rotate = case_.as_served,
          .search_scales = case_.as_served,
          .k_mean = case_.as_served ? mean_[side] : nullptr,
          .k_base = case_.k_base ? base_[side] : nullptr,
          .q_dot_mean = case_.as_served ? dot_[side] : nullptr,
          .kv = View(side),
          .window16 = Window16View(side),
          .batch = {},
          .num_nonfinite = num_nonfinite_[side]};
}

AttentionParams Layer::Attention(int side) const {
  return {.q = qkv_[side],
          .q_stride = static_cast<int64_t>(Row()),
          .q_heads = q_heads(),
          .softmax_scale = 1.f / std::sqrt(static_cast<float>(case_.head_dim)),
          .score_cap = case_.score_cap,
          .exact = side == kCpu,
          .window = case_.window,
          .sinks = case_.sinks ? sinks_[side] : nullptr,
          .q_dot_mean = case_.as_served && case_.sinks ? dot_[side] : nullptr,
          .kv = View(side),
          .window16 = Window16View(side),
          .rule = Rule(),
          .batch = {}};
}

void Layer::RunOps(int side, const BatchView& batch) {
  num_runs_ += side == kGpu ? 1 : 0;
  Device& device = *devices_.of[side];
  WriteKvParams write = Write(side);
  write.batch = batch;
  device.WriteKv(write);
  if (batch.num_to_quantize > 0) {
    device.QuantizeBlocks({.kv = View(side),
                           .window16 = Window16View(side),
                           .search_scales = case_.as_served,
                           .blocks_to_quantize = batch.blocks_to_quantize,
                           .num_to_quantize = batch.num_to_quantize});
  }
  AttentionParams attention = Attention(side);
  attention.out = out_[side];
  attention.batch = batch;
  if (batch.num_decode < batch.num_seqs) {
    device.PrefillAttention(attention);
  }
  if (batch.num_decode > 0) {
    device.DecodeAttention(attention);
  }
  device.FlattenKV({.k = dense_[side],
                    .v = dense_[side] + dense_.size() / 2,
                    .max_len = max_positions(),
                    .kv = View(side),
                    .window16 = Window16View(side),
                    .rule = Rule(),
                    .batch = batch});
}

void Layer::Step(const std::vector<int>& counts) {
  Arrays arrays;
  FillArrays(counts, arrays);
  const BatchView& batch = arrays.group.batch;
  const auto tokens = static_cast<size_t>(batch.num_tokens);
  num_with_pending_ += batch.num_to_quantize > 0 ? 1 : 0;
  qkv_.Write(Normal(tokens * Row(), 100 + steps_++));
  out_.Write(Unwritten(out_.size()));
  for (const int side : {kCpu, kGpu}) {
    devices_.of[side]->RunStep({.tokens = arrays.tokens.data(),
                                .groups = &arrays.group,
                                .num_groups = 1,
                                .q_heads = q_heads()},
                               [&] { RunOps(side, batch); });
    devices_.of[side]->Synchronize();
  }
  CHECK(qkv_.Same());
  CHECK(dot_.Same());
  CHECK(data_.Same());
  CHECK(scales_.Same());
  CHECK(window16_.Same());
  CHECK(dense_.Same());
  CHECK(num_nonfinite_.Same());
  const bool bfloat = case_.dtype == DataType::kBFloat16 &&
                      ((case_.window16 && case_.window_format == KvCacheMode::kNone) ||
                       case_.k == KvCacheMode::kNone || case_.v == KvCacheMode::kNone);
  CHECK(RelativeError(out_, tokens * Width()) < (bfloat ? kMaxErrorBFloat : kMaxError));
}

// Run a prefill step, a step that mixes a chunk with decode, and then decode steps. The decode step
// repeats often enough to be recorded and replayed.
void CheckCase(const KvCase& c) {
  const std::string text = Describe(c);
  CAPTURE(text);
  Devices devices;
  Layer layer(devices, c);
  layer.Step(c.contexts);
  layer.Step({1, 1, kTokensOfPrompt});
  for (int i = 0; i < 4; ++i) {
    layer.Step({1, 1, 1});
  }
}

TEST_CASE("every format matches the CPU with both 16-bit dtypes and head_dim 64 and 128") {
  for (const KvCacheMode format : kAllKvCacheModes) {
    CheckCase({.k = format, .v = format, .dtype = DataType::kFloat16});
    CheckCase({.k = format, .v = format, .head_dim = 128, .contexts = {66, 20, 40}});
  }
}

TEST_CASE("4-bit formats match the CPU with rotation, scale search, mean and 16-bit window") {
  for (const KvCacheMode format : {KvCacheMode::kFp4Nv, KvCacheMode::kFp4Mx, KvCacheMode::kInt4}) {
    CheckCase({.k = format, .v = format, .window16 = true, .as_served = true});
    CheckCase({.k = format,
               .v = format,
               .group = 8,
               .window = 32,
               .sinks = true,
               .as_served = true,
               .contexts = {90, 20, 50}});
  }
}

TEST_CASE("blocks with K offsets match the CPU, with windows in 16 bits and in int8") {
  int i = 0;
  for (const KvCacheMode format : kAllKvCacheModes) {
    for (const KvCacheMode window_format : {KvCacheMode::kNone, KvCacheMode::kInt8}) {
      if (format == KvCacheMode::kNone) {
        continue;
      }
      CheckCase({.k = format,
                 .v = format,
                 .dtype = i % 3 == 0 ? DataType::kFloat16 : DataType::kBFloat16,
                 .head_dim = i % 4 == 1 ? 128 : 64,
                 .window = i % 5 == 4 ? 100 : 0,
                 .sinks = i % 2 == 0,
                 .window16 = true,
                 .window_format = window_format,
                 .k_offset = true,
                 .as_served = i % 3 != 2,
                 .score_cap = i % 6 == 5 ? 0.5f : 0.f});
      ++i;
    }
  }
}

TEST_CASE("K offsets from a bias match the CPU, with a window in int8 and without one") {
  for (const KvCacheMode format : {KvCacheMode::kFp4Nv, KvCacheMode::kFp8E5m2}) {
    for (const bool window16 : {false, true}) {
      CheckCase({.k = format,
                 .v = format,
                 .window16 = window16,
                 .window_format = KvCacheMode::kInt8,
                 .k_offset = true,
                 .k_base = true,
                 .as_served = format == KvCacheMode::kFp4Nv});
    }
  }
}

TEST_CASE("an int8 window without K offsets matches the CPU") {
  CheckCase({.k = KvCacheMode::kFp4Nv,
             .v = KvCacheMode::kFp4Nv,
             .window16 = true,
             .window_format = KvCacheMode::kInt8});
  CheckCase({.k = KvCacheMode::kFp8E4m3,
             .v = KvCacheMode::kInt4,
             .dtype = DataType::kFloat16,
             .window16 = true,
             .window_format = KvCacheMode::kInt8});
}

TEST_CASE("steps that quantize blocks are recorded and replayed") {
  Devices devices;
  // Three steps quantize blocks: two blocks at once, then one, then one.
  Layer layer(devices, {.k = KvCacheMode::kFp4Nv,
                        .v = KvCacheMode::kFp4Nv,
                        .kv_heads = 1,
                        .group = 1,
                        .window16 = true,
                        .k_offset = true,
                        .contexts = {143, 143, 142, 141}});
  layer.Step({143, 143, 142, 141});
  for (int i = 0; i < 6; ++i) {
    layer.Step({1, 1, 1, 1});
  }
  CHECK(layer.num_with_pending() == 3);
  CHECK(layer.num_steps() == 7);
  // The prefill step, and the first two steps of each of two decode shapes; the second is recorded.
  CHECK(layer.num_runs() == 5);
}

TEST_CASE("soft caps of scores match the CPU") {
  CheckCase({.k = KvCacheMode::kNone, .v = KvCacheMode::kNone, .score_cap = 0.5f});
  CheckCase({.k = KvCacheMode::kFp4Nv, .v = KvCacheMode::kFp4Nv, .window = 40, .score_cap = 0.5f});
  CheckCase({.k = KvCacheMode::kInt8,
             .v = KvCacheMode::kInt4,
             .sinks = true,
             .window16 = true,
             .score_cap = 0.5f});
}

TEST_CASE("sliding windows with sinks match the CPU, also when K is wider than V") {
  CheckCase({.k = KvCacheMode::kNone, .v = KvCacheMode::kNone, .window = 40, .sinks = true});
  CheckCase({.k = KvCacheMode::kInt8, .v = KvCacheMode::kFp4Nv, .window = 40, .sinks = true});
  CheckCase({.k = KvCacheMode::kFp8E4m3, .v = KvCacheMode::kInt4, .window16 = true});
}

}  // namespace
}  // namespace turbomind::testing
