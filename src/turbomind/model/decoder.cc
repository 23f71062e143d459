// ⑥⑦ The forward pass: embedding, then attention and feed-forward per layer, then final norm and
// logits of the needed rows. Attention and feed-forward are each preceded by a norm and added to
// the residual.

#include "turbomind/model/decoder.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <utility>

#include "turbomind/core/check.h"
#include "turbomind/ops/attention.h"
#include "turbomind/ops/checkpoints.h"
#include "turbomind/ops/moe.h"
#include "turbomind/ops/process_kv.h"
#include "turbomind/ops/quantize_blocks.h"

namespace turbomind {
namespace {

// Returns part `index` of a linear layer.
MatrixView ViewPart(const LinearWeight& linear, size_t index = 0) {
  int64_t row = 0;
  for (size_t i = 0; i < index; ++i) {
    row += linear.parts[i]->rows;
  }
  const float* bias = linear.bias.data;
  return {linear.parts[index].get(), bias == nullptr ? nullptr : bias + row};
}

MoeLayer ViewExperts(const ModelConfig& model, const MoeWeights& weights) {
  if (weights.experts.empty()) {
    return {};
  }
  MoeLayer layer = {.hidden_size = model.hidden_size,
                    .num_experts = model.moe.num_experts,
                    .top_k = model.moe.top_k,
                    .intermediate_size = model.moe.intermediate_size,
                    .shared_intermediate_size = model.moe.shared_intermediate_size,
                    .latent_size = model.moe.latent_size,
                    .normalize = model.moe.normalize,
                    .sigmoid = model.moe.sigmoid,
                    .weigh_inputs = model.moe.weigh_inputs,
                    .num_groups = model.moe.num_groups,
                    .top_groups = model.moe.top_groups,
                    .best_of_group = model.moe.best_of_group,
                    .scale = model.moe.scale,
                    .activation = model.activation,
                    .swiglu_limit = model.swiglu_limit,
                    .router = ViewPart(weights.router),
                    .score_bias = weights.score_bias.data,
                    .expert_scale = weights.expert_scale.data};
  for (const ExpertWeights& expert : weights.experts) {
    if (!model.gated) {
      layer.up.push_back(ViewPart(expert.gate_up));
    } else if (expert.interleaved()) {
      layer.gate_up.push_back(ViewPart(expert.gate_up));
    } else {
      layer.gate.push_back(ViewPart(expert.gate_up, 0));
      layer.up.push_back(ViewPart(expert.gate_up, 1));
    }
    layer.down.push_back(ViewPart(expert.down));
  }
  if (layer.latent_size > 0) {
    layer.latent_down = ViewPart(weights.latent_down);
    layer.latent_up = ViewPart(weights.latent_up);
  }
  if (layer.shared_intermediate_size > 0) {
    if (model.gated) {
      layer.shared_gate = ViewPart(weights.shared_gate_up, 0);
    }
    layer.shared_up = ViewPart(weights.shared_gate_up, model.gated ? 1 : 0);
    layer.shared_down = ViewPart(weights.shared_down);
    if (model.moe.shared_gate) {
      layer.shared_router = ViewPart(weights.shared_router);
    }
  }
  return layer;
}

// Returns whether the step may be recorded and replayed: its ops do not depend on the rows it
// returns.
bool DecodesOnly(const BatchView& batch) { return batch.num_decode == batch.num_seqs; }

}  // namespace

Decoder::Decoder(DecoderConfig config, std::shared_ptr<const Weights> weights, Device& device)
    : config_(std::move(config)), weights_(std::move(weights)), device_(device) {
  const ModelConfig& model = config_.model;
  for (const RopeConfig& rope : model.ropes) {
    const std::vector<float>& inv_freq = ropes_.emplace_back(rope).inv_freq();
    inv_freqs_.emplace_back(device, inv_freq.data(), static_cast<int64_t>(inv_freq.size()));
  }
  Check(config_.layers.size() == weights_->layers.size(), "there must be one cache view per layer");
  for (int i = 0; i < model.num_layers; ++i) {
    last_mixer_ = model.HasMixer(i) ? i : last_mixer_;
    last_writer_ = model.OwnsKv(i) || model.recurrent.Has(i) ? i : last_writer_;
  }
  bool shifts_sinks = false;
  StepLimits& limits = config_.limits;
  Check(limits.max_tokens > 0 && limits.max_logit_rows > 0 && limits.ffn_rows > 0,
        "max_tokens, max_logit_rows and ffn_rows must be positive");
  for (size_t i = 0; i < config_.layers.size(); ++i) {
    const bool removes_mean = config_.layers[i].k_mean != nullptr;
    limits.removes_mean = limits.removes_mean || removes_mean;
    shifts_sinks = shifts_sinks || (removes_mean && !weights_->layers[i].sinks.empty());
    const MoeWeights& moe = weights_->layers[i].moe;
    const int num_experts = model.moe.HasExperts(static_cast<int>(i)) ? model.moe.num_experts : 0;
    Check(moe.experts.size() == static_cast<size_t>(num_experts),
          "the weights must have every expert");
    experts_.push_back(ViewExperts(model, moe));
    const LayerCache& cache = config_.layers[i];
    if (!cache.has_attention()) {
      continue;
    }
    const auto group = static_cast<size_t>(cache.group);
    step_groups_.resize(std::max(step_groups_.size(), group + 1));
    step_groups_[group] = {.batch = {},
                           .window = cache.window,
                           .kv_heads = cache.kv.kv_heads,
                           .has_window16 = cache.window16.data != nullptr,
                           .rule = cache.rule};
  }
  k_biases_ = KBiasArrays(config_, *weights_, ropes_, device_);
  num_clipped_.assign(step_groups_.size(), 0);
  scratch_bytes_ = scratch_.Place(model, limits, nullptr);
  memory_ = static_cast<std::byte*>(device_.Reserve(static_cast<size_t>(scratch_bytes_)));
  scratch_.Place(model, limits, memory_);
  if (!shifts_sinks) {
    scratch_.q_dot_mean = nullptr;  // needed only by layers with sinks
  }
}

Decoder::~Decoder() { device_.Release(memory_, static_cast<size_t>(scratch_bytes_)); }

void Decoder::Forward(const DecoderInput& input) {
  const BatchView& batch = input.batch.front();
  Check(batch.num_tokens > 0 && batch.num_tokens <= config_.limits.max_tokens,
        "the step must fit into the scratch memory");
  Check(input.rows.empty() || input.rows.back() < batch.num_tokens,
        "the requested rows must be tokens of the step");
  count_is_old_ = true;
  for (size_t i = 0; i < step_groups_.size(); ++i) {
    step_groups_[i].batch = input.batch[i];
  }
  if (!input.restores.empty()) {
    invokeRestoreCheckpoints(device_, CopiesOf(input.restores));
  }
  device_.RunStep({.tokens = input.tokens,
                   .groups = step_groups_.data(),
                   .num_groups = static_cast<int>(step_groups_.size()),
                   .q_heads = model().num_heads,
                   .states = input.states.slots != nullptr ? &input.states : nullptr},
                  [&] { RunLayers(input); });
  if (!input.checkpoints.empty()) {
    invokeSaveCheckpoints(device_, CopiesOf(input.checkpoints));
  }
  if (DecodesOnly(batch)) {
    GatherRows(input.rows, scratch_.hidden, model().hidden_size);
  }
  num_rows_ = static_cast<int>(input.rows.size());
}

// Computes the angles of the step's tokens, and those of their blocks if a layer needs them.
void Decoder::FillRopes(const BatchView& batch) {
  const auto fill = [&](size_t i, const RopeAngles& to, int block_seq_len) {
    device_.FillRope({.table = &ropes_[i],
                      .inv_freq = inv_freqs_[i].data(),
                      .positions = batch.positions,
                      .cos = to.cos,
                      .sin = to.sin,
                      .num_tokens = batch.num_tokens,
                      .block_seq_len = block_seq_len,
                      .sets = ropes_[i].num_sets() > 1 ? batch.rope_sets : nullptr});
  };
  for (size_t i = 0; i < ropes_.size(); ++i) {
    if (ropes_[i].enabled()) {
      fill(i, scratch_.ropes[i], 0);
      if (k_biases_.base_block_seq_len() > 0) {
        fill(i, scratch_.block_ropes[i], k_biases_.base_block_seq_len());
      }
    }
  }
}

void Decoder::RunLayers(const DecoderInput& input) {
  const BatchView& batch = input.batch.front();
  device_.Embed({.table = weights_->embedding.get(),
                 .ids = input.tokens,
                 .out = scratch_.hidden,
                 .num_tokens = batch.num_tokens,
                 .scale = model().embedding_scale});
  FillRopes(batch);
  if (model().per_layer.exist()) {
    FillPerLayerInputs(input);
  }
  int num_rows = batch.num_tokens;
  for (int i = 0; i < model().num_layers; ++i) {
    const LayerWeights& layer = weights_->layers[static_cast<size_t>(i)];
    if (model().HasMixer(i)) {
      const bool has_no_rows = input.rows.empty() && i == last_writer_;
      const bool only_rows = (i == last_mixer_ || has_no_rows) && !DecodesOnly(batch);
      if (!Mix(i, MixerInput(i, num_rows), input, only_rows)) {
        return;
      }
      num_rows = only_rows ? static_cast<int>(input.rows.size()) : num_rows;
      AddMixers(i, num_rows);
      AddBranch(layer.attention_output_norm, num_rows);
    }
    if (model().HasFeedForward(i)) {
      FeedForward(i, num_rows);
      AddBranch(layer.ffn_output_norm, num_rows);
    }
    if (model().per_layer.exist()) {
      AddPerLayerInputs(i, num_rows);
    }
    if (model().layer_scale) {
      device_.SoftCap({.x = scratch_.hidden,
                       .count = int64_t{num_rows} * model().hidden_size,
                       .scale = layer.scale});
    }
  }
}

Decoder::Output Decoder::BranchOutput(int first, int num_rows) const {
  const int64_t offset = int64_t{first} * model().hidden_size;
  if (model().ChangesBranches()) {
    return {scratch_.branch + offset, num_rows, false};
  }
  return {scratch_.hidden + offset, num_rows, true};
}

// Adds the branch to `hidden`, after its norm if the model has one.
void Decoder::AddBranch(const NormWeight& norm, int num_rows) {
  if (!model().ChangesBranches()) {
    return;
  }
  if (model().norm.outputs) {
    device_.Norm(NormOf(norm, scratch_.branch, scratch_.branch, num_rows));
  }
  device_.Add({.x = scratch_.branch,
               .out = scratch_.hidden,
               .count = int64_t{num_rows} * model().hidden_size,
               .scale = model().residual_scale});
}

void Decoder::GatherRows(std::span<const int32_t> rows, float* values, int64_t width) {
  const auto num_rows = static_cast<int64_t>(rows.size());
  for (int64_t first = 0, end = 0; first < num_rows; first = end) {
    const int32_t* from = rows.data() + first;
    const int64_t distance = *from - first;
    do {
      ++end;  // groups consecutive rows whose target does not overlap them into one copy
    } while (end < num_rows && end - first < distance &&
             rows[static_cast<size_t>(end)] == from[end - first - 1] + 1);
    if (distance > 0) {
      device_.Copy(values + first * width, values + *from * width,
                   static_cast<size_t>((end - first) * width) * sizeof(float));
    }
  }
}

NormParams Decoder::FinalNorm(int first, int num_rows) const {
  Check(num_rows > 0 && num_rows <= config_.limits.max_logit_rows,
        "the rows must fit into the scratch memory");
  Check(first >= 0 && first + num_rows <= num_rows_,
        "the rows must have been requested from Forward");
  return NormOf(weights_->final_norm, scratch_.hidden + int64_t{first} * model().hidden_size,
                scratch_.selected, num_rows);
}

const float* Decoder::ReadHidden(int first, int num_rows) {
  device_.Norm(FinalNorm(first, num_rows));
  ReadOldCounts();
  const size_t row_bytes = static_cast<size_t>(model().hidden_size) * sizeof(float);
  return static_cast<const float*>(
      device_.ReadBack(scratch_.selected, static_cast<size_t>(num_rows) * row_bytes));
}

void Decoder::ComputeLogits(int first, int num_rows) {
  const LinearPart head = {&weights_->output_head()};
  device_.Project({.norm = FinalNorm(first, num_rows),
                   .linear = {.x = scratch_.selected,
                              .x_stride = model().hidden_size,
                              .parts = &head,
                              .num_parts = 1,
                              .y = scratch_.logits,
                              .y_stride = model().vocab_size,
                              .num_rows = num_rows}});
  if (model().logit_scale != 1.f || model().logit_cap != 0.f) {
    device_.SoftCap({.x = scratch_.logits,
                     .count = int64_t{num_rows} * model().vocab_size,
                     .scale = model().logit_scale,
                     .cap = model().logit_cap});
  }
  num_logit_rows_ = num_rows;
}

bool Decoder::ArgMaxTokens(int32_t* tokens) {
  if (!device_.ArgMaxRows({.logits = scratch_.logits,
                           .ids = scratch_.chosen,
                           .num_rows = num_logit_rows_,
                           .vocab_size = model().vocab_size})) {
    return false;
  }
  ReadTokens(static_cast<size_t>(num_logit_rows_), tokens);
  return true;
}

bool Decoder::SampleTokens(std::span<const RowSampling> samplings, int32_t* tokens) {
  Check(samplings.size() <= static_cast<size_t>(num_logit_rows_),
        "each row must be sampled at most once");
  if (!device_.SampleRows({.logits = scratch_.logits,
                           .samplings = samplings.data(),
                           .ids = scratch_.chosen,
                           .num_samplings = static_cast<int>(samplings.size()),
                           .vocab_size = model().vocab_size})) {
    return false;
  }
  ReadTokens(samplings.size(), tokens);
  return true;
}

void Decoder::ReadTokens(size_t count, int32_t* tokens) {
  const size_t num_bytes = count * sizeof(int32_t);
  const auto begin = static_cast<size_t>(reinterpret_cast<std::byte*>(scratch_.chosen) -
                                         reinterpret_cast<std::byte*>(scratch_.num_nonfinite));
  const auto* read =
      static_cast<const std::byte*>(device_.ReadBack(scratch_.num_nonfinite, begin + num_bytes));
  ReadCounts(read);
  std::memcpy(tokens, read + begin, num_bytes);
}

// Reads the counters. `read` is a copy of the scratch that begins at num_nonfinite.
void Decoder::ReadCounts(const std::byte* read) {
  std::memcpy(&num_nonfinite_, read, sizeof(num_nonfinite_));
  read += OffsetOfClipped();
  std::fill(num_clipped_.begin(), num_clipped_.end(), 0);
  for (const LayerCache& layer : config_.layers) {
    int64_t clipped = 0;
    std::memcpy(&clipped, read, sizeof(clipped));
    if (layer.has_attention()) {
      num_clipped_[static_cast<size_t>(layer.group)] += clipped;
    }
    read += sizeof(clipped);
  }
  count_is_old_ = false;
}

// Reads the counters unless the step's are known.
void Decoder::ReadOldCounts() {
  if (count_is_old_) {
    const size_t num_bytes = OffsetOfClipped() + config_.layers.size() * sizeof(int64_t);
    ReadCounts(static_cast<const std::byte*>(device_.ReadBack(scratch_.num_nonfinite, num_bytes)));
  }
}

size_t Decoder::OffsetOfClipped() const {
  return static_cast<size_t>(reinterpret_cast<std::byte*>(scratch_.num_clipped) -
                             reinterpret_cast<std::byte*>(scratch_.num_nonfinite));
}

float* Decoder::ReadLogits(std::span<const int32_t> rows) {
  Check(!rows.empty() && rows.back() < num_logit_rows_, "the logits must have been computed");
  num_logit_rows_ = 0;
  const int64_t width = model().vocab_size;
  const size_t row_bytes = static_cast<size_t>(width) * sizeof(float);
  for (size_t i = 0; i < rows.size(); ++i) {  // makes the rows contiguous for one read
    const auto to = static_cast<int64_t>(i);
    if (rows[i] != to) {
      device_.Copy(scratch_.logits + to * width, scratch_.logits + rows[i] * width, row_bytes);
    }
  }
  ReadOldCounts();
  return static_cast<float*>(device_.ReadBack(scratch_.logits, rows.size() * row_bytes));
}

// Prepares Q for attention, writes the step's K and V to the cache, and quantizes blocks that leave
// the 16-bit window.
void Decoder::WriteKv(int index, const BatchView& batch) {
  const LayerWeights& layer = weights_->layers[static_cast<size_t>(index)];
  const LayerCache& cache = config_.layers[static_cast<size_t>(index)];
  const bool by_head = !model().norm.qk_all_heads;
  const bool owns_kv = model().OwnsKv(index);
  if (!by_head) {
    NormHeads(index, batch.num_tokens);
  }
  const int rope = model().RopeOf(index);
  const RopeAngles angles = rope < 0 ? RopeAngles{} : scratch_.ropes[static_cast<size_t>(rope)];
  const float* k_base = k_biases_.base(index);
  const RopeAngles block_angles = rope < 0 || k_base == nullptr
                                      ? RopeAngles{}
                                      : scratch_.block_ropes[static_cast<size_t>(rope)];
  invokeProcessKV_v2(device_, {.qkv = scratch_.qkv,
                               .bias = k_biases_.qkv_bias(index),
                               .q_norm = by_head ? layer.q_norm.data : nullptr,
                               .k_norm = by_head ? layer.k_norm.data : nullptr,
                               .v_norm = layer.v_norm.data,
                               .only_queries = !owns_kv,
                               .norm_eps = model().norm_eps,
                               .rope_cos = angles.cos,
                               .rope_sin = angles.sin,
                               .rope_dim = rope < 0 ? 0 : ropes_[static_cast<size_t>(rope)].dim(),
                               .norm_after_rope = model().norm.qk_after_rope,
                               .query_scaling = model().QueryScalingOf(index),
                               .q_heads = model().num_heads,
                               .rotate = config_.rotate_k,
                               .search_scales = config_.search_scales,
                               .k_mean = cache.k_mean,
                               .k_base = k_base,
                               .block_cos = block_angles.cos,
                               .block_sin = block_angles.sin,
                               .q_dot_mean = scratch_.q_dot_mean,
                               .kv = cache.kv,
                               .window16 = cache.window16,
                               .batch = batch,
                               .num_nonfinite = scratch_.num_nonfinite,
                               .num_clipped = scratch_.num_clipped + index});
  if (batch.num_to_quantize > 0 && owns_kv) {
    invokeQuantizeBlocks(device_, {.kv = cache.kv,
                                   .window16 = cache.window16,
                                   .search_scales = config_.search_scales,
                                   .blocks_to_quantize = batch.blocks_to_quantize,
                                   .num_to_quantize = batch.num_to_quantize,
                                   .num_clipped = scratch_.num_clipped + index});
  }
  if (config_.statistics != nullptr && owns_kv) {
    const int64_t q_size = model().QSize(index);
    const int64_t kv_size = model().KvSize(index);
    config_.statistics->Add(index, {.k = scratch_.qkv + q_size,
                                    .v = scratch_.qkv + q_size + kv_size,
                                    .stride = q_size + 2 * kv_size,
                                    .num_tokens = batch.num_tokens});
  }
}

// Normalizes Q and K over all heads, if the layer has norms for them.
void Decoder::NormHeads(int index, int num_tokens) {
  const LayerWeights& layer = weights_->layers[static_cast<size_t>(index)];
  const int q_size = static_cast<int>(model().QSize(index));
  const int kv_size = static_cast<int>(model().KvSize(index));
  if (layer.q_norm.empty()) {
    return;
  }
  NormParams params = {.x = scratch_.qkv,
                       .weight = layer.q_norm.data,
                       .out = scratch_.qkv,
                       .num_rows = num_tokens,
                       .dim = q_size,
                       .eps = model().norm_eps,
                       .stride = q_size + 2 * int64_t{kv_size}};
  device_.Norm(params);
  params.x = params.out = scratch_.qkv + q_size;
  params.weight = layer.k_norm.data;
  params.dim = kv_size;
  device_.Norm(params);
}

// Computes `attended` from Q for decode sequences and, if `include_prefill` is set, for the others.
void Decoder::Attention(int index, const BatchView& batch, bool include_prefill) {
  const LayerWeights& layer = weights_->layers[static_cast<size_t>(index)];
  const LayerCache& cache = config_.layers[static_cast<size_t>(index)];
  const auto head_dim = static_cast<float>(model().HeadDim(index));
  const float scale = model().softmax_scale;
  const AttentionParams attention = {
      .q = scratch_.qkv,
      .q_stride = model().QkvSize(index),
      .out = scratch_.attended,
      .q_heads = model().num_heads,
      .softmax_scale = scale != 0.f ? scale : 1.f / std::sqrt(head_dim),
      .score_cap = model().attention_cap,
      .exact = weights_->exact,
      .window = cache.window,
      .sinks = layer.sinks.data,
      .q_dot_mean = cache.k_mean != nullptr ? scratch_.q_dot_mean : nullptr,
      .fast_bias = k_biases_.fast(index),
      .kv = cache.kv,
      .window16 = cache.window16,
      .rule = cache.rule,
      .batch = batch};
  if (batch.num_decode > 0) {
    dispatchDecoding(device_, attention);
  }
  if (include_prefill && !DecodesOnly(batch)) {
    invokePrefillAttention(device_, attention);
  }
}

// Computes the feed-forward of `hidden`, or of its norm, in chunks of rows. Parallel branches share
// the norm of the mixers.
void Decoder::FeedForward(int index, int num_tokens) {
  const MoeLayer& experts = experts_[static_cast<size_t>(index)];
  const NormConfig& norms = model().norm;
  const NormWeight& norm = weights_->layers[static_cast<size_t>(index)].ffn_norm;
  const bool is_normed = norms.inputs && model().parallel;
  for (int first = 0; first < num_tokens; first += config_.limits.ffn_rows) {
    const int rows = std::min(config_.limits.ffn_rows, num_tokens - first);
    const int64_t offset = int64_t{first} * model().hidden_size;
    const Input x = {.x = (is_normed ? scratch_.normed : scratch_.hidden) + offset,
                     .norm = norms.inputs && !is_normed ? &norm : nullptr,
                     .normed = norms.inputs ? scratch_.normed + offset : nullptr};
    const Output out = BranchOutput(first, rows);
    if (model().HasDenseFeedForward(index)) {
      DenseFeedForward(index, x, out);
    }
    if (experts.empty()) {
      continue;
    }
    if (model().moe.beside_dense) {
      AddExpertsBeside(index, first, rows);
      continue;
    }
    invokeMoe(device_,
              {.layer = &experts,
               .norm = x.norm == nullptr ? NormParams{} : NormOf(*x.norm, x.x, x.normed, rows),
               .x = x.norm == nullptr ? x.x : x.normed,
               .out = out.y,
               .num_tokens = rows,
               .accumulate = out.accumulate,
               .scratch = scratch_.moe});
  }
}

// Computes down(activation(gate_up(x))).
void Decoder::DenseFeedForward(int index, const Input& x, const Output& out) {
  const LayerWeights& layer = weights_->layers[static_cast<size_t>(index)];
  Project(layer.gate_up, layer.gate_up.bias.data, x, {scratch_.gate_up, out.num_rows},
          {.gate_up = scratch_.gate_up,
           .out = scratch_.activated,
           .num_rows = out.num_rows,
           .dim = model().IntermediateSize(index),
           .activation = model().activation,
           .limit = model().swiglu_limit,
           .gated = model().gated});
  Project(layer.down, layer.down.bias.data, {scratch_.activated}, out);
}

void Decoder::Project(const LinearWeight& weight, const float* bias, const Input& x,
                      const Output& out, const GatedActivationParams& gate) {
  std::array<LinearPart, 6> parts;  // those of RecurrentWeights::input
  Check(weight.parts.size() <= parts.size(), "a linear layer must have at most six parts");
  int64_t output = 0;
  for (size_t i = 0; i < weight.parts.size(); ++i) {
    parts[i] = {weight.parts[i].get(), bias != nullptr ? bias + output : nullptr};
    output += weight.parts[i]->rows;
  }
  device_.Project(
      {.norm = x.norm == nullptr ? NormParams{} : NormOf(*x.norm, x.x, x.normed, out.num_rows),
       .linear = {.x = x.norm == nullptr ? x.x : x.normed,
                  .x_stride = weight.cols(),
                  .parts = parts.data(),
                  .num_parts = static_cast<int>(weight.parts.size()),
                  .y = out.y,
                  .y_stride = weight.rows(),
                  .num_rows = out.num_rows,
                  .accumulate = out.accumulate},
       .gate = gate});
}

NormParams Decoder::NormOf(const NormWeight& norm, const float* x, float* out, int num_rows) const {
  return {.x = x,
          .weight = norm.weight.data,
          .out = out,
          .num_rows = num_rows,
          .dim = model().hidden_size,
          .eps = model().norm_eps,
          .bias = norm.bias.data,
          .centered = model().norm.centered};
}

}  // namespace turbomind
