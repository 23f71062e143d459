#pragma once

#include <cstdint>
#include <vector>

namespace turbomind {

enum class RopeKind : uint8_t { kNone, kDefault, kLinear, kDynamic, kLlama3, kYarn, kLongRope };

// Rotary position embedding. Names and meaning match Hugging Face configs.
struct RopeConfig {
  RopeKind kind = RopeKind::kDefault;
  float theta = 10000.f;
  int dim = 0;  // the number of values of a head that rotate
  float factor = 1.f;
  int original_max_position = 0;  // original_max_position_embeddings
  float low_freq_factor = 1.f;    // llama3
  float high_freq_factor = 4.f;   // llama3
  float beta_fast = 32.f;         // yarn
  float beta_slow = 1.f;          // yarn
  float attention_factor = 0.f;   // yarn; 0: derive from factor. longrope; positive
  bool truncate = true;           // yarn: round the correction range to integers
  // Divisors of the dim / 2 frequencies: GGUF's rope_freqs (llama3) as stored, or the short factors
  // of longrope. May be empty for other kinds.
  std::vector<float> freq_factors;
  // longrope: the divisors for sequences that may exceed original_max_position. Empty: there are no
  // such sequences.
  std::vector<float> long_factors;
};

}  // namespace turbomind
