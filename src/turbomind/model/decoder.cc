// ⑥⑦ The forward pass: embed; per layer attention and feed-forward, each behind a norm and added to
// the residual; final norm and logits of the rows that need them.

#include "turbomind/model/decoder.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "turbomind/core/check.h"
#include "turbomind/ops/attention.h"
#include "turbomind/ops/process_kv.h"
#include "turbomind/ops/quantise_blocks.h"

namespace turbomind {
namespace {

// Rows of the feed-forward done at a time: their activations stay in the caches, and scratch does
// not grow with the step. Rows are independent, so the cut changes no result.
constexpr int kFfnRows = 512;

const float* OrNull(const std::vector<float>& v) { return v.empty() ? nullptr : v.data(); }

}  // namespace

Decoder::Decoder(DecoderConfig config, std::shared_ptr<const Weights> weights, Device& device)
    : config_(std::move(config)),
      weights_(std::move(weights)),
      device_(device),
      rope_(config_.model.rope) {
  ModelConfig& model = config_.model;
  Check(config_.layers.size() == weights_->layers.size(), "one cache view per layer");
  Check(config_.max_tokens > 0 && config_.max_logit_rows > 0, "a step has tokens and logits");
  if (model.softmax_scale == 0.f) {
    model.softmax_scale = 1.f / std::sqrt(static_cast<float>(model.head_dim));
  }
  bool shifts_sinks = false;
  for (size_t i = 0; i < config_.layers.size(); ++i) {
    shifts_sinks =
        shifts_sinks || (config_.layers[i].k_mean != nullptr && !weights_->layers[i].sinks.empty());
  }
  const int64_t tokens = config_.max_tokens;
  const int64_t ffn_rows = std::min(config_.max_tokens, kFfnRows);
  const int64_t q_size = int64_t{model.num_heads} * model.head_dim;
  const int64_t kv_size = int64_t{model.num_kv_heads} * model.head_dim;
  const int64_t half_rope = rope_.enabled() ? rope_.dim() / 2 : 0;
  const std::pair<float**, int64_t> buffers[] = {
      {&hidden_, tokens * model.hidden_size},
      {&normed_, tokens * model.hidden_size},
      {&qkv_, tokens * (q_size + 2 * kv_size)},
      {&attended_, tokens * q_size},
      {&gate_up_, ffn_rows * 2 * model.intermediate_size},
      {&activated_, ffn_rows * model.intermediate_size},
      {&q_dot_mean_, shifts_sinks ? tokens * model.num_heads : 0},
      {&cos_, tokens * half_rope},
      {&sin_, tokens * half_rope},
      {&selected_, int64_t{config_.max_logit_rows} * model.hidden_size},
      {&logits_, int64_t{config_.max_logit_rows} * model.vocab_size},
  };
  const auto padded = [](int64_t floats) { return (floats * 4 + 63) / 64 * 64; };
  for (const auto& [target, floats] : buffers) {
    scratch_bytes_ += padded(floats);
  }
  scratch_ = static_cast<std::byte*>(device_.Reserve(static_cast<size_t>(scratch_bytes_)));
  std::byte* next = scratch_;
  for (const auto& [target, floats] : buffers) {
    *target = reinterpret_cast<float*>(next);
    next += padded(floats);
  }
  q_dot_mean_ = shifts_sinks ? q_dot_mean_ : nullptr;
}

Decoder::~Decoder() { device_.Release(scratch_, static_cast<size_t>(scratch_bytes_)); }

void Decoder::Forward(const DecoderInput& input) {
  const BatchView& batch = input.batch.front();
  Check(batch.num_tokens > 0 && batch.num_tokens <= config_.max_tokens,
        "the step fits the scratch");
  device_.Embed({.table = weights_->embedding.get(),
                 .ids = input.tokens,
                 .out = hidden_,
                 .num_tokens = batch.num_tokens});
  if (rope_.enabled()) {
    rope_.Fill(batch.positions, batch.num_tokens, cos_, sin_);
  }
  for (int i = 0; i < model().num_layers; ++i) {
    const LayerWeights& layer = weights_->layers[static_cast<size_t>(i)];
    const int group = config_.layers[static_cast<size_t>(i)].group;
    Norm(layer.attention_norm, hidden_, normed_, batch.num_tokens);
    Attention(i, input.batch[static_cast<size_t>(group)]);
    Norm(layer.ffn_norm, hidden_, normed_, batch.num_tokens);
    FeedForward(layer, batch.num_tokens);
  }
}

float* Decoder::Logits(const int32_t* rows, int num_rows) {
  Check(num_rows > 0 && num_rows <= config_.max_logit_rows, "the logits fit the scratch");
  const int64_t width = model().hidden_size;
  for (int i = 0; i < num_rows; ++i) {
    device_.Copy(selected_ + i * width, hidden_ + rows[i] * width,
                 static_cast<size_t>(width) * sizeof(float));
  }
  Norm(weights_->final_norm, selected_, selected_, num_rows);
  device_.Linear({.x = selected_,
                  .x_stride = width,
                  .weight = &weights_->output_head(),
                  .y = logits_,
                  .y_stride = model().vocab_size,
                  .num_rows = num_rows});
  device_.Synchronize();
  return logits_;
}

// qkv_ → Q ready for attention, K and V of this step in the cache, and blocks that leave the recent
// window quantised.
void Decoder::StoreKV(int index, const BatchView& batch) {
  const LayerWeights& layer = weights_->layers[static_cast<size_t>(index)];
  const LayerCache& cache = config_.layers[static_cast<size_t>(index)];
  const bool rotates = rope_.enabled();
  invokeProcessKV_v2(device_, {.qkv = qkv_,
                               .bias = OrNull(layer.qkv.bias),
                               .q_norm = OrNull(layer.q_norm),
                               .k_norm = OrNull(layer.k_norm),
                               .norm_eps = model().norm_eps,
                               .rope_cos = rotates ? cos_ : nullptr,
                               .rope_sin = rotates ? sin_ : nullptr,
                               .rope_dim = rotates ? rope_.dim() : 0,
                               .q_heads = model().num_heads,
                               .rotate = config_.rotate_k,
                               .search_scales = config_.search_scales,
                               .k_mean = cache.k_mean,
                               .q_dot_mean = q_dot_mean_,
                               .kv = cache.kv,
                               .hot = cache.hot,
                               .batch = batch,
                               .num_nonfinite = &num_nonfinite_});
  if (batch.num_moves > 0) {
    invokeQuantiseBlocks(device_, {.kv = cache.kv,
                                   .hot = cache.hot,
                                   .search_scales = config_.search_scales,
                                   .moves = batch.moves,
                                   .num_moves = batch.num_moves});
  }
  if (config_.statistics != nullptr) {
    const int64_t q_size = int64_t{model().num_heads} * model().head_dim;
    const int64_t kv_size = int64_t{model().num_kv_heads} * model().head_dim;
    config_.statistics->Add(index, {.k = qkv_ + q_size,
                                    .v = qkv_ + q_size + kv_size,
                                    .stride = q_size + 2 * kv_size,
                                    .num_tokens = batch.num_tokens});
  }
}

// normed_ → hidden_ += output(attention(qkv(normed_))), K and V stored on the way.
void Decoder::Attention(int index, const BatchView& batch) {
  const LayerWeights& layer = weights_->layers[static_cast<size_t>(index)];
  const LayerCache& cache = config_.layers[static_cast<size_t>(index)];
  Project(layer.qkv, nullptr, normed_, {qkv_, batch.num_tokens});
  StoreKV(index, batch);
  const int64_t heads = int64_t{model().num_heads} + 2 * int64_t{model().num_kv_heads};
  const AttentionParams attention = {.q = qkv_,
                                     .q_stride = heads * model().head_dim,
                                     .out = attended_,
                                     .q_heads = model().num_heads,
                                     .softmax_scale = model().softmax_scale,
                                     .window = cache.window,
                                     .sinks = OrNull(layer.sinks),
                                     .q_dot_mean = cache.k_mean != nullptr ? q_dot_mean_ : nullptr,
                                     .kv = cache.kv,
                                     .hot = cache.hot,
                                     .rule = cache.rule,
                                     .batch = batch};
  if (batch.num_decode > 0) {
    dispatchDecoding(device_, attention);
  }
  if (batch.num_decode < batch.num_seqs) {
    invokePrefillAttention(device_, attention);
  }
  Project(layer.output, OrNull(layer.output.bias), attended_, {hidden_, batch.num_tokens, true});
}

// normed_ → hidden_ += down(activation(gate_up(normed_))).
void Decoder::FeedForward(const LayerWeights& layer, int num_tokens) {
  for (int first = 0; first < num_tokens; first += kFfnRows) {
    const int rows = std::min(kFfnRows, num_tokens - first);
    const int64_t offset = int64_t{first} * model().hidden_size;
    Project(layer.gate_up, OrNull(layer.gate_up.bias), normed_ + offset, {gate_up_, rows});
    device_.GatedActivation({.gate_up = gate_up_,
                             .out = activated_,
                             .num_rows = rows,
                             .dim = model().intermediate_size,
                             .activation = model().activation});
    Project(layer.down, OrNull(layer.down.bias), activated_, {hidden_ + offset, rows, true});
  }
}

// Each part of the weight fills its own columns of y.
void Decoder::Project(const LinearWeight& weight, const float* bias, const float* x,
                      const Output& out) {
  const int64_t width = weight.rows();
  int64_t column = 0;
  for (const auto& part : weight.parts) {
    device_.Linear({.x = x,
                    .x_stride = weight.cols(),
                    .weight = part.get(),
                    .bias = bias != nullptr ? bias + column : nullptr,
                    .y = out.y + column,
                    .y_stride = width,
                    .num_rows = out.num_rows,
                    .accumulate = out.accumulate});
    column += part->rows;
  }
}

void Decoder::Norm(const std::vector<float>& weight, const float* x, float* out, int num_rows) {
  device_.RmsNorm({.x = x,
                   .weight = weight.data(),
                   .out = out,
                   .num_rows = num_rows,
                   .dim = model().hidden_size,
                   .eps = model().norm_eps});
}

}  // namespace turbomind
