#pragma once

#include <cstdint>

namespace turbomind {

// Multi-head latent attention (DeepSeek-V2): all heads read one latent of ModelConfig::head_dim
// values per token, and a rotary part beside it. num_kv_heads is 1.
struct LatentConfig {
  int q_rank = 0;            // of the query's latent; 0: queries are projected at once
  int nope_dim = 0;          // values of a query head that do not rotate
  int rope_dim = 0;          // values that rotate; 0: the model has no latents
  int value_dim = 0;         // values of a head's output
  bool interleaved = false;  // RoPE rotates the pairs (2i, 2i + 1) instead of (i, i + dim / 2)
  float norm_eps = 1e-6f;    // of the norms of both latents

  bool exists() const { return rope_dim > 0; }
  int QueryDim() const { return nope_dim + rope_dim; }
};

}  // namespace turbomind
