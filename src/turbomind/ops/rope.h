#pragma once

// ⑥ Rotary position embedding: computes the angles of each token of a step for WriteKvParams.

#include <cstdint>
#include <vector>

#include "turbomind/ops/rope_config.h"

namespace turbomind {

// Returns the config for an engine with sequences of up to session_len tokens. kDynamic becomes
// kDefault with the base that transformers uses for one call of session_len tokens; if session_len
// is at most original_max_position, that is theta. With one base for all positions, a score depends
// only on the distance of its tokens, and sequences can share keys. For the same reason kLongRope
// uses its long factors for all positions if session_len is above original_max_position, as vLLM
// does. Other kinds are unchanged.
// REQUIRES: a config that RopeTable accepts.
RopeConfig ResolveRope(RopeConfig config, int session_len);

// Cos and sin of every (position, frequency), as Hugging Face transformers computes them.
//
// Invariants:
//  1. The values of a position depend only on the config and the position, so cached keys can be
//     shared. kDynamic uses the base of short sequences: see ResolveRope.
//  2. The attention factor (yarn) is part of cos and sin.
// Immutable, so any thread may use it.
class RopeTable {
 public:
  // Throws InvalidArgument that names the field (dim odd or not positive, factor <= 0, ...).
  explicit RopeTable(const RopeConfig& config);

  // Fills cos and sin, each [num_tokens, dim / 2]. Writes nothing for kNone.
  void Fill(const int32_t* positions, int num_tokens, float* cos, float* sin) const;

  // Fills cos and sin, each [num_positions], of one frequency at the positions from 0 on.
  void FillWave(int frequency, int64_t num_positions, float* cos, float* sin) const;

  bool enabled() const { return config_.kind != RopeKind::kNone; }
  int dim() const { return config_.dim; }
  const RopeConfig& config() const { return config_; }
  const std::vector<float>& inv_freq() const { return inv_freq_; }  // [dim / 2]
  float attention_factor() const { return attention_factor_; }

 private:
  RopeConfig config_;
  std::vector<float> inv_freq_;  // [dim / 2]
  float attention_factor_ = 1.f;
};

}  // namespace turbomind
