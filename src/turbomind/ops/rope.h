#pragma once

// ⑥ Rotary position embedding: computes the angles of each token of a step for WriteKvParams.

#include <cstdint>
#include <vector>

#include "turbomind/ops/rope_config.h"

namespace turbomind {

// Returns the config for an engine with sequences of up to session_len tokens. kDynamic becomes
// kDefault with the base that transformers uses for one call of session_len tokens; if session_len
// is at most original_max_position, that is theta. With one base for all positions, a score depends
// only on the distance of its tokens, and sequences can share keys. kLongRope keeps its long
// factors only if session_len is above original_max_position: each sequence then chooses one of the
// two sets for all its positions, or, without `by_sequence`, all of them use the long factors.
// Other kinds are unchanged. REQUIRES: a config that RopeTable accepts.
RopeConfig ResolveRope(RopeConfig config, int session_len, bool by_sequence = true);

// Cos and sin of every (position, frequency), as Hugging Face transformers computes them.
//
// Invariants:
//  1. The values of a position depend only on the config and the position, so cached keys can be
//     shared. kDynamic uses the base of short sequences: see ResolveRope.
//  2. The attention factor (yarn) is part of cos and sin.
//  3. Set 0 of the frequencies has `freq_factors`. Set 1 exists only with `long_factors`.
// Immutable, so any thread may use it.
class RopeTable {
 public:
  // Throws InvalidArgument that names the field (dim odd or not positive, factor <= 0, ...).
  explicit RopeTable(const RopeConfig& config);

  // Fills cos and sin, each [num_tokens, dim / 2]. `sets` has the set of each token; null: all 0.
  // Writes nothing for kNone.
  void Fill(const int32_t* positions, const int32_t* sets, int num_tokens, float* cos,
            float* sin) const;

  // Fills cos and sin, each [num_positions], of one frequency of set 0 at the positions from 0 on.
  void FillWave(int frequency, int64_t num_positions, float* cos, float* sin) const;

  bool enabled() const { return config_.kind != RopeKind::kNone; }
  int dim() const { return config_.dim; }
  int num_sets() const { return config_.long_factors.empty() ? 1 : 2; }
  const RopeConfig& config() const { return config_; }
  const std::vector<float>& inv_freq() const { return inv_freq_; }  // [num_sets, dim / 2]
  float attention_factor() const { return attention_factor_; }

 private:
  RopeConfig config_;
  std::vector<float> inv_freq_;  // [num_sets, dim / 2]
  float attention_factor_ = 1.f;
};

}  // namespace turbomind
