// ⑥⑦ The branches of the forward pass that mix tokens: attention, recurrent layers, or their sum.

#include <algorithm>
#include <cstdint>

#include "turbomind/model/decoder.h"
#include "turbomind/ops/recurrent.h"

namespace turbomind {

Decoder::Input Decoder::MixerInput(int index, int num_tokens) {
  const LayerWeights& layer = weights_->layers[static_cast<size_t>(index)];
  if (!model().norm.inputs) {
    return {scratch_.hidden};
  }
  if (layer.qkv.is_normed || layer.recurrent.input.is_normed) {
    return {scratch_.hidden, &layer.attention_norm, scratch_.normed};
  }
  device_.Norm(NormOf(layer.attention_norm, scratch_.hidden, scratch_.normed, num_tokens));
  return {scratch_.normed};
}

bool Decoder::Mix(int index, const Input& x, const DecoderInput& input, bool only_rows) {
  const LayerWeights& layer = weights_->layers[static_cast<size_t>(index)];
  const bool recurs = model().recurrent.Has(index);
  const bool attends = model().HasAttention(index);
  if (recurs) {
    Recur(index, x, input);
  }
  if (attends && !(model().latent.exists() ? AttendLatents(index, x.x, input, only_rows)
                                           : Attend(index, x, input, only_rows))) {
    return false;
  }
  if (!only_rows) {
    return true;
  }
  if (input.rows.empty()) {
    return false;
  }
  GatherRows(input.rows, scratch_.hidden, model().hidden_size);
  if (attends) {
    GatherRows(input.rows, scratch_.attended, layer.output.cols());
  }
  if (recurs) {
    GatherRows(input.rows, scratch_.mixed, layer.recurrent.output.cols());
  }
  if (model().parallel) {
    GatherRows(input.rows, scratch_.normed, model().hidden_size);
  }
  if (model().per_layer.exist()) {
    GatherRows(input.rows, scratch_.per_layer,
               int64_t{model().num_layers} * model().per_layer.size);
  }
  return true;
}

// Computes `attended`. Returns false after K and V are written if no row is needed.
bool Decoder::Attend(int index, const Input& x, const DecoderInput& input, bool only_rows) {
  const LayerWeights& layer = weights_->layers[static_cast<size_t>(index)];
  const LayerCache& cache = config_.layers[static_cast<size_t>(index)];
  const BatchView& batch = input.batch[static_cast<size_t>(cache.group)];
  Project(layer.qkv, nullptr, x, {scratch_.qkv, batch.num_tokens});
  WriteKv(index, batch);
  if (only_rows && input.rows.empty()) {
    return false;
  }
  Attention(index, batch, !only_rows || input.rows.back() >= batch.num_decode);
  if (model().attention_gate) {
    Project(layer.attention_gate, layer.attention_gate.bias.data, x,
            {scratch_.attention_gate, batch.num_tokens});
    device_.SigmoidGate({.x = scratch_.attended,
                         .gate = scratch_.attention_gate,
                         .count = batch.num_tokens * layer.attention_gate.rows()});
  }
  return true;
}

// Computes the branch of `attended`, of `mixed`, or of their sum.
void Decoder::AddMixers(int index, int num_rows) {
  const LayerWeights& layer = weights_->layers[static_cast<size_t>(index)];
  Output out = BranchOutput(0, num_rows);
  if (model().HasAttention(index)) {
    Project(layer.output, layer.output.bias.data, {scratch_.attended}, out);
    out.accumulate = true;
  }
  if (model().recurrent.Has(index)) {
    const LinearWeight& output = layer.recurrent.output;
    Project(output, output.bias.data, {scratch_.mixed}, out);
  }
}

StateCopyParams Decoder::CopiesOf(std::span<const StateCopy> copies) const {
  return {.states = config_.states,
          .checkpoints = config_.checkpoints,
          .shape = model().recurrent.State(),
          .format = config_.checkpoint_format,
          .copies = copies.data(),
          .num_copies = static_cast<int>(copies.size())};
}

// Computes `mixed`, and the states of the layer.
void Decoder::Recur(int index, const Input& x, const DecoderInput& input) {
  const RecurrentWeights& layer = weights_->layers[static_cast<size_t>(index)].recurrent;
  const LayerCache& cache = config_.layers[static_cast<size_t>(index)];
  const RecurrentConfig& shape = model().recurrent;
  const BatchView& batch = input.batch.front();
  const bool only_convolves = shape.rule == RecurrentRule::kShortConvolution;
  const float* gates = scratch_.projected + shape.Channels();  // the parts after those of v
  Project(layer.input, layer.input.bias.data, x, {scratch_.projected, batch.num_tokens});
  invokeShortConvolution(device_, {.x = scratch_.projected,
                                   .in_gate = only_convolves ? gates : nullptr,
                                   .out_gate = only_convolves ? gates + shape.width : nullptr,
                                   .x_stride = layer.input.rows(),
                                   .weight = layer.convolution.data,
                                   .bias = layer.convolution_bias.data,
                                   .out = only_convolves ? scratch_.mixed : scratch_.convolved,
                                   .channels = static_cast<int>(shape.Channels()),
                                   .kernel = shape.kernel,
                                   .silu = !only_convolves,
                                   .state = cache.convolution,
                                   .states = input.states,
                                   .batch = batch});
  if (only_convolves) {
    return;
  }
  UpdateMatrices(index, input);
  const int num_groups = std::max(shape.norm_groups, 1);
  device_.GatedNorm({.x = scratch_.mixed,
                     .z = gates,
                     .z_stride = layer.input.rows(),
                     .weight = layer.norm.data,
                     .out = scratch_.mixed,
                     .num_rows = batch.num_tokens,
                     .dim = static_cast<int>(shape.ValueSize()),
                     .group = static_cast<int>(shape.ValueSize() / num_groups),
                     .eps = model().norm_eps,
                     .gate_first = shape.gate_first});
}

// Computes `mixed` up to the norm, and the matrices of the heads, from `convolved` and `projected`.
void Decoder::UpdateMatrices(int index, const DecoderInput& input) {
  const RecurrentWeights& layer = weights_->layers[static_cast<size_t>(index)].recurrent;
  const LayerCache& cache = config_.layers[static_cast<size_t>(index)];
  const RecurrentConfig& shape = model().recurrent;
  const float* after_z = scratch_.projected + shape.Channels() + shape.ValueSize();
  StateHeads heads = {.qkv_stride = shape.Channels(),
                      .gate_stride = layer.input.rows(),
                      .decay = layer.decay.data,
                      .dt_bias = layer.dt_bias.data,
                      .out = scratch_.mixed,
                      .key_heads = shape.num_key_heads,
                      .value_heads = shape.num_value_heads,
                      .key_dim = shape.key_dim,
                      .value_dim = shape.value_dim,
                      .tiled = shape.tiled,
                      .state = cache.matrices,
                      .states = input.states,
                      .batch = input.batch.front()};
  if (shape.rule == RecurrentRule::kSelectiveScan) {
    heads.v = scratch_.convolved;
    heads.k = heads.v + shape.ValueSize();
    heads.q = heads.k + shape.KeySize();
    heads.a = after_z;
    invokeSelectiveScan(device_, {.heads = heads, .skip = layer.skip.data});
    return;
  }
  heads.q = scratch_.convolved;
  heads.k = heads.q + shape.KeySize();
  heads.v = heads.k + shape.KeySize();
  heads.a = after_z + shape.num_value_heads;
  invokeGatedDelta(device_, {.heads = heads, .b = after_z});
}

}  // namespace turbomind
