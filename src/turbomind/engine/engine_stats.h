#pragma once

#include <cstdint>
#include <vector>

#include "turbomind/core/members.h"

namespace turbomind {

struct EngineStats {
  int num_waiting = 0;
  int num_running = 0;
  int64_t blocks_total = 0;  // quantized pools
  int64_t blocks_free = 0;
  int64_t blocks_cached = 0;
  int64_t blocks_active = 0;
  int64_t window16_blocks_total = 0;
  int64_t window16_blocks_free = 0;
  int64_t window16_blocks_cached = 0;  // evictable 16-bit copies
  int64_t window16_blocks_active = 0;
  int64_t checkpoints_total = 0;  // slots for checkpoints of recurrent layers
  int64_t checkpoints_kept = 0;   // of them, in the prefix cache or in use
  int64_t prefix_queried_tokens = 0;
  int64_t prefix_hit_tokens = 0;
  int64_t prefix_cut_tokens = 0;  // found, but the 16-bit copy or the checkpoint was missing
  int64_t num_preemptions = 0;
  int64_t num_steps = 0;
  int64_t prompt_tokens = 0;
  int64_t generated_tokens = 0;
  int64_t draft_tokens = 0;     // computed to see whether they are right
  int64_t accepted_tokens = 0;  // of them
  int64_t num_nonfinite = 0;    // NaN and infinite values found while quantizing K and V
  // Values that exceeded the range of their KV format, by layer group.
  struct Clipped {
    int window = 0;  // as in kv/sliding_window.h
    int64_t num_values = 0;
  };
  std::vector<Clipped> clipped;

  // All of them. Python sees them under their names.
  using Members = MemberList<
      &EngineStats::num_waiting, &EngineStats::num_running, &EngineStats::blocks_total,
      &EngineStats::blocks_free, &EngineStats::blocks_cached, &EngineStats::blocks_active,
      &EngineStats::window16_blocks_total, &EngineStats::window16_blocks_free,
      &EngineStats::window16_blocks_cached, &EngineStats::window16_blocks_active,
      &EngineStats::checkpoints_total, &EngineStats::checkpoints_kept,
      &EngineStats::prefix_queried_tokens, &EngineStats::prefix_hit_tokens,
      &EngineStats::prefix_cut_tokens, &EngineStats::num_preemptions, &EngineStats::num_steps,
      &EngineStats::prompt_tokens, &EngineStats::generated_tokens, &EngineStats::draft_tokens,
      &EngineStats::accepted_tokens, &EngineStats::num_nonfinite, &EngineStats::clipped>;
};

}  // namespace turbomind
