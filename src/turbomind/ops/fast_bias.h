#pragma once

#include <cstdint>

namespace turbomind {

// The fast part of K's bias: pairs of channels that RoPE turns so far within a block that a K
// offset would leave too much of them. Cached keys leave it out, and attention adds its products
// with the queries to the scores. RoPE of one pair at position p is cos(p θ) u + sin(p θ) w with u
// and w that are the same at all positions, so q · u and q · w are computed once per query.
struct FastBias {
  int num_pairs = 0;                  // per KV head, at most kMaxFastPairs; 0: none
  const float* directions = nullptr;  // [kv_heads, num_pairs, 2, head_dim] u and w, rotated like K
  const int32_t* waves_of = nullptr;  // [kv_heads, num_pairs] indices into `waves`
  const float* waves = nullptr;       // [..., 2, num_positions] cos and sin of every position
  int64_t num_positions = 0;          // a multiple of kTileTokens
};
inline constexpr int kMaxFastPairs = 16;

}  // namespace turbomind
