// ⑥⑦ Multi-head latent attention of the forward pass. Queries are absorbed: the matrix that makes
// a head's keys from latents multiplies the query instead, and the one that makes its values
// multiplies the sum of latents. Keys and values of heads never exist.

#include <algorithm>
#include <cstdint>

#include "turbomind/model/decoder.h"
#include "turbomind/ops/latent.h"
#include "turbomind/ops/quantize_blocks.h"

namespace turbomind {

bool Decoder::AttendLatents(int index, const float* x, const DecoderInput& input, bool only_rows) {
  const LayerCache& cache = config_.layers[static_cast<size_t>(index)];
  const BatchView& batch = input.batch[static_cast<size_t>(cache.group)];
  ProjectLatents(index, x, batch.num_tokens);
  WriteLatents(index, batch);
  if (only_rows && input.rows.empty()) {
    return false;
  }
  const int heads = model().num_heads;
  const int pass = scratch_.latent.HeadsOfPass(heads, batch.num_tokens);
  for (int first = 0; first < heads; first += pass) {
    LatentHeads(index, batch, first, std::min(pass, heads - first));
  }
  return true;
}

// Computes the queries, and the rows of the cache up to RoPE.
void Decoder::ProjectLatents(int index, const float* x, int num_tokens) {
  const LatentWeights& layer = weights_->layers[static_cast<size_t>(index)].latent;
  const LatentScratch& scratch = scratch_.latent;
  NormParams norm = {.num_rows = num_tokens, .eps = model().latent.norm_eps};
  const float* q_input = x;
  if (!layer.q_down.empty()) {
    Project(layer.q_down, layer.q_down.bias.data, {x}, {scratch.q_latents, num_tokens});
    norm.x = norm.out = scratch.q_latents;
    norm.weight = layer.q_norm.data;
    norm.dim = model().latent.q_rank;
    device_.Norm(norm);
    q_input = scratch.q_latents;
  }
  Project(layer.q, layer.q.bias.data, {q_input}, {scratch.q, num_tokens});
  Project(layer.down, layer.down.bias.data, {x}, {scratch.rows, num_tokens});
  norm.x = norm.out = scratch.rows;
  norm.weight = layer.norm.data;
  norm.dim = model().head_dim;
  norm.stride = layer.down.rows();
  device_.Norm(norm);
}

// Rotates queries and rows, writes the rows to the cache, and quantizes blocks that leave the
// 16-bit window.
void Decoder::WriteLatents(int index, const BatchView& batch) {
  const LayerCache& cache = config_.layers[static_cast<size_t>(index)];
  const RopeAngles angles = scratch_.ropes[static_cast<size_t>(model().RopeOf(index))];
  invokeWriteLatents(device_, {.q = scratch_.latent.q,
                               .rows = scratch_.latent.rows,
                               .q_heads = model().num_heads,
                               .nope_dim = model().latent.nope_dim,
                               .rope_cos = angles.cos,
                               .rope_sin = angles.sin,
                               .interleaved = model().latent.interleaved,
                               .rotate = config_.rotate_k,
                               .search_scales = config_.search_scales,
                               .kv = cache.kv,
                               .window16 = cache.window16,
                               .batch = batch,
                               .num_nonfinite = scratch_.num_nonfinite,
                               .num_clipped = scratch_.num_clipped + index});
  if (batch.num_to_quantize > 0) {
    invokeQuantizeBlocks(device_, {.kv = cache.kv,
                                   .window16 = cache.window16,
                                   .search_scales = config_.search_scales,
                                   .blocks_to_quantize = batch.blocks_to_quantize,
                                   .num_to_quantize = batch.num_to_quantize,
                                   .num_clipped = scratch_.num_clipped + index});
  }
}

// Computes `attended` for some heads.
void Decoder::LatentHeads(int index, const BatchView& batch, int first_head, int num_heads) {
  const LatentWeights& layer = weights_->layers[static_cast<size_t>(index)].latent;
  const LayerCache& cache = config_.layers[static_cast<size_t>(index)];
  const LatentConfig& latent = model().latent;
  const LatentScratch& scratch = scratch_.latent;
  const int rank = model().head_dim;
  const int64_t pass_stride = int64_t{num_heads} * rank;
  const float* q = scratch.q + int64_t{first_head} * latent.QueryDim();
  invokeHeadLinear(device_, {.x = q,
                             .x_stride = model().QuerySize(),
                             .x_head_stride = latent.QueryDim(),
                             .y = scratch.absorbed,
                             .y_stride = pass_stride,
                             .y_head_stride = rank,
                             .heads = layer.k_up.data() + first_head,
                             .num_heads = num_heads,
                             .num_rows = batch.num_tokens});
  invokeLatentAttention(device_, {.q = scratch.absorbed,
                                  .q_stride = pass_stride,
                                  .q_rotary = q + latent.nope_dim,
                                  .q_rotary_stride = model().QuerySize(),
                                  .q_rotary_head_stride = latent.QueryDim(),
                                  .out = scratch.sums,
                                  .q_heads = num_heads,
                                  .softmax_scale = model().softmax_scale,
                                  .rotate = config_.rotate_k,
                                  .exact = weights_->exact,
                                  .kv = cache.kv,
                                  .window16 = cache.window16,
                                  .rule = cache.rule,
                                  .batch = batch});
  invokeHeadLinear(device_, {.x = scratch.sums,
                             .x_stride = pass_stride,
                             .x_head_stride = rank,
                             .y = scratch_.attended + int64_t{first_head} * latent.value_dim,
                             .y_stride = model().AttendedSize(),
                             .y_head_stride = latent.value_dim,
                             .heads = layer.v_up.data() + first_head,
                             .num_heads = num_heads,
                             .num_rows = batch.num_tokens});
}

}  // namespace turbomind
