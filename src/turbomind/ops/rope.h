#pragma once

// ⑥ Rotary position embedding: the angles of each token of a step, for WriteKvParams.

#include <cstdint>
#include <vector>

#include "turbomind/ops/rope_config.h"

namespace turbomind {

// The settings of an engine for texts of up to session_len tokens: kDynamic becomes kDefault with
// the base that transformers takes for one call of session_len tokens, theta itself where that is
// at most original_max_position. One base for every position of every text keeps what a score may
// depend on to the distance of its tokens, and lets texts share keys. Other kinds stay as they are.
// REQUIRES: a config that RopeTable takes.
RopeConfig ResolveRope(RopeConfig config, int session_len);

// Cos and sin of every (position, frequency) as Hugging Face transformers computes them.
//
// Invariants:
//  1. The values of a position depend on nothing but the config and the position, so that cached
//     keys may be shared. kDynamic has the base of short texts: see ResolveRope.
//  2. The attention factor (yarn) is part of cos and sin.
// Immutable: any thread may use it.
class RopeTable {
 public:
  // Throws InvalidArgument naming the field (dim odd or not positive, factor <= 0, ...).
  explicit RopeTable(const RopeConfig& config);

  // Fills cos and sin, each [num_tokens, dim / 2]. Nothing is written for kNone.
  void Fill(const int32_t* positions, int num_tokens, float* cos, float* sin) const;

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
