#pragma once

// A layer with its cache, its queries and a simulated GPU, for the tests of decode attention.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cuda/gpu_array.h"
#include "kv/first_seen.h"
#include "turbomind/backend/cpu/cpu_device.h"
#include "turbomind/backend/cuda/attention/attention_ops.h"
#include "turbomind/backend/cuda/decode/decode_ops.h"
#include "turbomind/backend/cuda/runtime/event_timer.h"
#include "turbomind/backend/cuda/runtime/step_arrays.h"
#include "turbomind/backend/cuda/runtime/step_graphs.h"
#include "turbomind/kv/codec.h"
#include "turbomind/kv/k_offset.h"
#include "turbomind/kv/layout.h"

namespace turbomind::cuda::decode_step {

// Relative to the output's L2 norm. FP16 operands have 11 bits; weights of a BF16 cache have 8.
inline constexpr double kMaxError = 1e-3;
inline constexpr double kMaxErrorBFloat = 6e-3;

struct Case {
  KvCacheMode k = KvCacheMode::kFp4Nv;
  KvCacheMode v = KvCacheMode::kFp4Nv;
  DataType dtype = DataType::kFloat16;
  int head_dim = 64;
  int kv_heads = 1;
  int group = 3;
  int block_seq_len = 64;
  int window = 0;
  PrecisionWindowTokens window16 = {};
  KvCacheMode window_format = KvCacheMode::kNone;
  bool k_offset = false;  // of both pools, where K is quantized
  int fast_pairs = 0;     // FastBias::num_pairs
  float score_cap = 0.f;
  bool sinks = false;
  bool mean = false;
  int max_context = 300;
  int max_seqs = 3;
};

// One pool of a layer: random rows of all sequences in shuffled blocks. The rest is poisoned.
struct Pool {
  Pool(const Case& c, KvCacheMode k, KvCacheMode v, std::mt19937* random);

  int32_t Block(int sequence, int index) const {
    return blocks[static_cast<size_t>(sequence * blocks_per_seq + index)];
  }

  block::Layout layout;
  int blocks_per_seq;
  std::vector<int32_t> blocks;
  std::vector<std::byte> data;
  std::vector<std::byte> scales;
  std::vector<float> global_scale[2];
  KvLayerView view;
};

inline block::Config ConfigOf(const Case& c, KvCacheMode k, KvCacheMode v) {
  block::Config config;
  config.layers = {{k, v}};
  config.kv_heads = c.kv_heads;
  config.head_dim = c.head_dim;
  config.block_seq_len = c.block_seq_len;
  config.dtype = c.dtype;
  config.k_offset = c.k_offset;
  return config;
}

inline void FillRow(const KvLayerView& view, KvSide side, int64_t block, int head, int slot,
                    const float* row) {
  const int s = static_cast<int>(side);
  const KvRow to = view.Row(side, block, head, slot);
  const float global_scale = view.global_scale[s] != nullptr ? view.global_scale[s][head] : 1.f;
  DispatchFormat(view.format[s], [&]<KvCacheMode M>() {
    Codec<M>::EncodeRow(row, view.head_dim, view.dtype, global_scale, to.payload, to.metadata);
  });
}

inline Pool::Pool(const Case& c, KvCacheMode k, KvCacheMode v, std::mt19937* random)
    : layout(ConfigOf(c, k, v)), blocks_per_seq((c.max_context - 1) / c.block_seq_len + 1) {
  const int total = blocks_per_seq * c.max_seqs;
  data.assign(static_cast<size_t>(total * layout.block_bytes()), std::byte{0xff});
  scales.assign(static_cast<size_t>(total * layout.scale_block_bytes()), std::byte{0x7f});
  view = layout.LayerView(0, data.data(), scales.empty() ? nullptr : scales.data());
  for (int i = 0; i < total; ++i) {
    blocks.push_back(i);
  }
  std::shuffle(blocks.begin(), blocks.end(), *random);
  for (int side = 0; side < 2; ++side) {
    for (int head = 0; head < c.kv_heads && HasGlobalScale(view.format[side]); ++head) {
      global_scale[side].push_back(0.5f + 0.25f * static_cast<float>(head + side));
      view.global_scale[side] = global_scale[side].data();
    }
  }
  std::normal_distribution<float> normal(0.2f);
  std::vector<float> row(static_cast<size_t>(c.head_dim));
  for (int i = 0; i < 2 * c.max_seqs * c.max_context * c.kv_heads; ++i) {
    std::generate(row.begin(), row.end(), [&] { return normal(*random); });
    const int position = i / 2 / c.kv_heads % c.max_context;
    const int32_t block = Block(i / 2 / c.kv_heads / c.max_context, position / c.block_seq_len);
    FillRow(view, static_cast<KvSide>(i % 2), block, i / 2 % c.kv_heads, position % c.block_seq_len,
            row.data());
  }
  std::normal_distribution<float> offsets(0.f, 2.f);
  for (int i = 0; view.HasKOffset() && i < total * c.kv_heads; ++i) {
    std::generate(row.begin(), row.end(), [&] { return offsets(*random); });
    const KvRow to = view.KOffset(i / c.kv_heads, i % c.kv_heads);
    KOffsetCodec::EncodeRow(row.data(), c.head_dim, c.dtype, 1.f, to.payload, to.metadata);
  }
}

// One layer with its queries, on the host.
struct Layer {
  explicit Layer(const Case& of, unsigned seed = 1)
      : c(of),
        random(seed),
        rule(MakePrecisionWindow(c.window16, c.block_seq_len)),
        quantized(c, c.k, c.v, &random),
        window16(c, c.window_format, c.window_format, &random) {
    std::normal_distribution<float> normal;
    const auto sampling = [&](bool wanted, int count) {
      std::vector<float> values(wanted ? static_cast<size_t>(count) : 0);
      std::generate(values.begin(), values.end(), [&] { return normal(random); });
      return values;
    };
    q = sampling(true, c.max_seqs * q_stride());
    sinks = sampling(c.sinks, q_heads());
    q_dot_mean = sampling(c.mean, c.max_seqs * q_heads());
    directions = sampling(true, c.kv_heads * c.fast_pairs * 2 * c.head_dim);
    waves = sampling(true, (c.fast_pairs + 1) * 2 * num_positions());
    for (int i = 0; i < c.kv_heads * c.fast_pairs; ++i) {
      waves_of.push_back((i / c.fast_pairs + i % c.fast_pairs + 1) % (c.fast_pairs + 1));
    }
  }

  int num_positions() const {
    return (c.max_context + kTileTokens - 1) / kTileTokens * kTileTokens;
  }
  int q_heads() const { return c.group * c.kv_heads; }
  int q_stride() const { return (q_heads() + 2 * c.kv_heads) * c.head_dim; }
  size_t out_size() const { return static_cast<size_t>(c.max_seqs * q_heads() * c.head_dim); }

  AttentionParams Params() const {
    AttentionParams p;
    p.q = q.data();
    p.q_stride = q_stride();
    p.q_heads = q_heads();
    p.softmax_scale = 2.f / std::sqrt(static_cast<float>(c.head_dim));
    p.score_cap = c.score_cap;
    p.exact = true;
    p.window = c.window;
    p.sinks = c.sinks ? sinks.data() : nullptr;
    p.q_dot_mean = c.mean ? q_dot_mean.data() : nullptr;
    p.fast_bias = {c.fast_pairs, directions.data(), waves_of.data(), waves.data(), num_positions()};
    p.kv = quantized.view;
    p.rule = rule;
    if (rule.enabled()) {
      p.window16 = window16.view;
    }
    return p;
  }

  Case c;
  std::mt19937 random;
  PrecisionWindow rule;
  Pool quantized;
  Pool window16;
  std::vector<float> q;
  std::vector<float> sinks;
  std::vector<float> q_dot_mean;
  std::vector<float> directions;  // of the FastBias
  std::vector<float> waves;
  std::vector<int32_t> waves_of;
};

// A decode step over some of a layer's sequences. The tables omit blocks that no query sees.
struct Step {
  // sequences[i] of the layer sees its first context_lens[i] positions.
  Step(const Layer& layer, std::vector<int32_t> lens, std::vector<int> sequences);

  StepParams Params() {
    return {.tokens = tokens.data(), .groups = &group, .num_groups = 1, .q_heads = q_heads};
  }

  int q_heads;
  std::vector<int32_t> context_lens;
  std::vector<int32_t> positions;
  std::vector<int32_t> cu_seqlens = {0};
  std::vector<int32_t> tokens;
  std::vector<int32_t> tables;
  std::vector<int32_t> window16_tables;
  StepGroup group;
};

inline Step::Step(const Layer& layer, std::vector<int32_t> lens, std::vector<int> sequences)
    : q_heads(layer.q_heads()), context_lens(std::move(lens)) {
  const Case& c = layer.c;
  const auto num_seqs = static_cast<int>(context_lens.size());
  for (int i = 0; i < num_seqs; ++i) {
    const int context = context_lens[static_cast<size_t>(i)];
    positions.push_back(context - 1);
    cu_seqlens.push_back(i + 1);
    tokens.push_back(0);
    for (int j = 0; j < layer.quantized.blocks_per_seq; ++j) {
      const int first = j * c.block_seq_len;
      const bool is_seen =
          first < context && first + c.block_seq_len > FirstSeen(c.window, context - 1);
      const bool is_in_window16 =
          layer.rule.enabled() && is_seen && layer.rule.IsInWindow16(j, context - 1);
      const int sequence = sequences[static_cast<size_t>(i)];
      tables.push_back(is_seen && !is_in_window16 ? layer.quantized.Block(sequence, j) : -1);
      window16_tables.push_back(is_in_window16 ? layer.window16.Block(sequence, j) : -1);
    }
  }
  group.batch = {.num_seqs = num_seqs,
                 .num_decode = num_seqs,
                 .num_tokens = num_seqs,
                 .cu_seqlens = cu_seqlens.data(),
                 .context_lens = context_lens.data(),
                 .positions = positions.data(),
                 .block_tables = tables.data(),
                 .block_table_stride = layer.quantized.blocks_per_seq};
  group.batch.window16_tables = layer.rule.enabled() ? window16_tables.data() : nullptr;
  group.window = c.window;
  group.kv_heads = c.kv_heads;
  group.has_window16 = layer.rule.enabled();
  group.rule = layer.rule;
}

inline std::vector<int> FirstSequences(size_t count) {
  std::vector<int> sequences;
  for (size_t i = 0; i < count; ++i) {
    sequences.push_back(static_cast<int>(i));
  }
  return sequences;
}

// A GPU that holds a layer's memory.
class TestGpu {
 public:
  TestGpu(const Layer& layer, int num_sms)
      : stream_(CreateStream()),
        layer_(layer),
        quantized_data_(stream_, layer.quantized.data),
        quantized_scales_(stream_, layer.quantized.scales),
        window16_data_(stream_, layer.window16.data),
        global_scale_{{stream_, layer.quantized.global_scale[0]},
                      {stream_, layer.quantized.global_scale[1]}},
        q_(stream_, layer.q),
        sinks_(stream_, layer.sinks),
        q_dot_mean_(stream_, layer.q_dot_mean),
        directions_(stream_, layer.directions),
        waves_(stream_, layer.waves),
        waves_of_(stream_, layer.waves_of),
        out_(stream_, std::vector<float>(layer.out_size(), NAN)),
        workspace_(stream_) {
    context_.stream = stream_;
    context_.gpu = PropertiesOf(0);
    context_.gpu.num_sms = num_sms;
    context_.workspace = &workspace_;
    arrays_ = std::make_unique<StepArrays>(stream_);
    planner_ = std::make_unique<DecodePlanner>(context_);
    graphs_ = std::make_unique<StepGraphs>(stream_);
  }
  ~TestGpu() {
    graphs_.reset();
    planner_.reset();
    arrays_.reset();
  }

  void Upload(Step* step) {
    const StepParams params = step->Params();
    arrays_->Upload(params);
    planner_->Upload(params);
  }
  void RunOp(const Step& step) {
    AttentionParams p = layer_.Params();
    p.q = q_.data();
    p.out = out_.data();
    p.sinks = sinks_.data();
    p.q_dot_mean = q_dot_mean_.data();
    p.fast_bias.directions = directions_.data();
    p.fast_bias.waves = waves_.data();
    p.fast_bias.waves_of = waves_of_.data();
    p.kv = layer_.quantized.layout.LayerView(0, quantized_data_.data(), quantized_scales_.data());
    p.kv.global_scale[0] = global_scale_[0].data();
    p.kv.global_scale[1] = global_scale_[1].data();
    if (layer_.rule.enabled()) {
      p.window16 = layer_.window16.layout.LayerView(0, window16_data_.data(), nullptr);
    }
    p.batch = arrays_->OnGpu(step.group.batch);
    ++num_ops_;
    CudaDecodeAttention(context_, *planner_, p);
  }
  // Return the rows of the step's sequences.
  std::vector<float> Output(const Step& step) {
    std::vector<float> out = out_.Read();
    out.resize(step.context_lens.size() * static_cast<size_t>(layer_.q_heads()) *
               static_cast<size_t>(layer_.c.head_dim));
    return out;
  }
  std::vector<float> Run(Step step) {
    Upload(&step);
    RunOp(step);
    return Output(step);
  }
  // Run a decode step as a device does: the second step of a shape is recorded, later ones are
  // replayed.
  std::vector<float> RunRecorded(Step step) {
    Upload(&step);
    ClearBytes(out_.data(), layer_.out_size() * sizeof(float), stream_);
    time_ = EventTimer(stream_).Time([&] {
      graphs_->Run(
          arrays_->shape(),
          [&] {
            return int64_t{arrays_->generation()} + planner_->generation() +
                   workspace_.generation();
          },
          [&] { RunOp(step); });
    });
    return Output(step);
  }

  const StepGraphs& graphs() const { return *graphs_; }
  DecodePlanner& planner() { return *planner_; }
  Context& context() { return context_; }
  int num_ops() const { return num_ops_; }
  // Return the launches of the last recorded step, or nothing on a GPU, which does not count them.
  std::optional<int> num_launches() const {
    return context_.gpu.name == "shim" ? std::optional(static_cast<int>(time_)) : std::nullopt;
  }

 private:
  Stream stream_;
  const Layer& layer_;
  GpuArray<std::byte> quantized_data_;
  GpuArray<std::byte> quantized_scales_;
  GpuArray<std::byte> window16_data_;
  GpuArray<float> global_scale_[2];
  GpuArray<float> q_;
  GpuArray<float> sinks_;
  GpuArray<float> q_dot_mean_;
  GpuArray<float> directions_;
  GpuArray<float> waves_;
  GpuArray<int32_t> waves_of_;
  GpuArray<float> out_;
  Workspace workspace_;
  Context context_;
  std::unique_ptr<StepArrays> arrays_;
  std::unique_ptr<DecodePlanner> planner_;
  std::unique_ptr<StepGraphs> graphs_;
  int num_ops_ = 0;
  double time_ = 0;  // of the last recorded step: on the shim, its launches
};

inline std::vector<float> OnCpu(const Layer& layer, const Step& step) {
  static const std::unique_ptr<Device> cpu = MakeCpuDevice(1);
  std::vector<float> out(step.context_lens.size() * static_cast<size_t>(layer.q_heads()) *
                         static_cast<size_t>(layer.c.head_dim));
  AttentionParams p = layer.Params();
  p.out = out.data();
  p.batch = step.group.batch;
  cpu->DecodeAttention(p);
  return out;
}

inline void CheckClose(const Layer& layer, const Step& step, const std::vector<float>& got) {
  const std::vector<float> want = OnCpu(layer, step);
  double error = 0;
  double norm = 0;
  REQUIRE(got.size() == want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    error += std::pow(double{got[i]} - want[i], 2);
    norm += std::pow(double{want[i]}, 2);
  }
  const Case& c = layer.c;
  const std::string name =
      std::string(ToString(c.k)) + " " + ToString(c.v) + " " + ToString(c.dtype) + " head_dim " +
      std::to_string(c.head_dim) + " block " + std::to_string(c.block_seq_len) + " window " +
      std::to_string(c.window) + " window of " + ToString(c.window_format) + " " +
      std::to_string(c.window16.sink_tokens) + "," + std::to_string(c.window16.recent_tokens) +
      (c.k_offset ? " K offsets" : "") + (c.fast_pairs > 0 ? " fast pairs" : "");
  CAPTURE(name);
  const bool bfloat = c.dtype == DataType::kBFloat16 &&
                      (c.v == KvCacheMode::kNone || c.k == KvCacheMode::kNone ||
                       (layer.rule.enabled() && c.window_format == KvCacheMode::kNone));
  CHECK(std::sqrt(error / norm) < (bfloat ? kMaxErrorBFloat : kMaxError));
}

}  // namespace turbomind::cuda::decode_step
