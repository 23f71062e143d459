// ⑦ Per-layer inputs: computed for all layers before the first one, and added by each layer.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "turbomind/model/decoder.h"

namespace turbomind {

// Computes (norm(projection of the embedding) + row of the table) / sqrt(2) for every layer. The
// model divides the projection by sqrt(hidden_size) before its norm, which is the same as a larger
// epsilon.
void Decoder::FillPerLayerInputs(const DecoderInput& input) {
  const int num_tokens = input.batch.front().num_tokens;
  const int size = model().per_layer.size;
  const int64_t width = int64_t{model().num_layers} * size;
  for (int first = 0; first < num_tokens; first += config_.limits.ffn_rows) {
    const int rows = std::min(config_.limits.ffn_rows, num_tokens - first);
    float* const out = scratch_.per_layer + first * width;
    Project(weights_->per_layer_projection, nullptr,
            {scratch_.hidden + int64_t{first} * model().hidden_size}, {out, rows});
    device_.Norm({.x = out,
                  .weight = weights_->per_layer_norm.data,
                  .out = out,
                  .num_rows = rows * model().num_layers,
                  .dim = size,
                  .eps = model().norm_eps * static_cast<float>(model().hidden_size)});
    device_.Embed({.table = weights_->per_layer_embedding.get(),
                   .ids = input.tokens + first,
                   .out = scratch_.per_layer_rows,
                   .num_tokens = rows,
                   .scale = std::sqrt(static_cast<float>(size))});
    device_.Add({.x = scratch_.per_layer_rows, .out = out, .count = rows * width});
  }
  device_.SoftCap({.x = scratch_.per_layer, .count = num_tokens * width, .scale = std::sqrt(0.5f)});
}

// Adds the branch of a layer's inputs, gated by its hidden values.
void Decoder::AddPerLayerInputs(int index, int num_rows) {
  const LayerWeights& layer = weights_->layers[static_cast<size_t>(index)];
  const int size = model().per_layer.size;
  const int64_t width = int64_t{model().num_layers} * size;
  for (int first = 0; first < num_rows; first += config_.limits.ffn_rows) {
    const int rows = std::min(config_.limits.ffn_rows, num_rows - first);
    const int64_t offset = int64_t{first} * model().hidden_size;
    float* const gate = scratch_.per_layer_gate;
    Project(layer.per_layer_gate, nullptr, {scratch_.hidden + offset}, {gate, rows});
    device_.GatedActivation({.gate_up = gate,
                             .out = gate,
                             .num_rows = rows,
                             .dim = size,
                             .activation = model().activation,
                             .gated = false,
                             .other = scratch_.per_layer + first * width + int64_t{index} * size,
                             .other_stride = width});
    Project(layer.per_layer_up, nullptr, {gate}, {scratch_.branch + offset, rows});
  }
  AddBranch(layer.per_layer_output_norm, num_rows);
}

}  // namespace turbomind
