// ⑥⑦ The recurrent layers of the forward pass.

#include <cstdint>

#include "turbomind/model/decoder.h"
#include "turbomind/ops/recurrent.h"

namespace turbomind {

// Computes `mixed`, and the states of the layer.
void Decoder::Recur(int index, const float* x, const DecoderInput& input) {
  const RecurrentWeights& layer = weights_->layers[static_cast<size_t>(index)].recurrent;
  const LayerCache& cache = config_.layers[static_cast<size_t>(index)];
  const RecurrentConfig& shape = model().recurrent;
  const BatchView& batch = input.batch.front();
  const int64_t channels = shape.Channels();
  const float* z = scratch_.projected + channels;
  const float* b = z + shape.ValueSize();
  Project(layer.input, layer.input.bias.data, x, {scratch_.projected, batch.num_tokens});
  invokeShortConvolution(device_, {.x = scratch_.projected,
                                   .x_stride = layer.input.rows(),
                                   .weight = layer.convolution.data,
                                   .out = scratch_.convolved,
                                   .channels = static_cast<int>(channels),
                                   .kernel = shape.kernel,
                                   .state = cache.convolution,
                                   .states = input.states,
                                   .batch = batch});
  invokeGatedDelta(device_, {.heads = {.q = scratch_.convolved,
                                       .k = scratch_.convolved + shape.KeySize(),
                                       .v = scratch_.convolved + 2 * shape.KeySize(),
                                       .qkv_stride = channels,
                                       .a = b + shape.num_value_heads,
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
                                       .batch = batch},
                             .b = b});
  device_.GatedNorm({.x = scratch_.mixed,
                     .z = z,
                     .z_stride = layer.input.rows(),
                     .weight = layer.norm.data,
                     .out = scratch_.mixed,
                     .num_rows = batch.num_tokens,
                     .dim = static_cast<int>(shape.ValueSize()),
                     .group = shape.value_dim,
                     .eps = model().norm_eps});
}

}  // namespace turbomind
