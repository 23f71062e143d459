#pragma once

#include <cstdint>
#include <vector>

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
  int64_t prefix_queried_tokens = 0;
  int64_t prefix_hit_tokens = 0;
  int64_t prefix_cut_tokens = 0;  // found, but the 16-bit copy was missing
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

  // Calls visit(name, pointer to member) for every member. Python sees them under these names.
  template <class Visit>
  static constexpr void ForEachMember(Visit visit) {
    visit("num_waiting", &EngineStats::num_waiting);
    visit("num_running", &EngineStats::num_running);
    visit("blocks_total", &EngineStats::blocks_total);
    visit("blocks_free", &EngineStats::blocks_free);
    visit("blocks_cached", &EngineStats::blocks_cached);
    visit("blocks_active", &EngineStats::blocks_active);
    visit("window16_blocks_total", &EngineStats::window16_blocks_total);
    visit("window16_blocks_free", &EngineStats::window16_blocks_free);
    visit("window16_blocks_cached", &EngineStats::window16_blocks_cached);
    visit("window16_blocks_active", &EngineStats::window16_blocks_active);
    visit("prefix_queried_tokens", &EngineStats::prefix_queried_tokens);
    visit("prefix_hit_tokens", &EngineStats::prefix_hit_tokens);
    visit("prefix_cut_tokens", &EngineStats::prefix_cut_tokens);
    visit("num_preemptions", &EngineStats::num_preemptions);
    visit("num_steps", &EngineStats::num_steps);
    visit("prompt_tokens", &EngineStats::prompt_tokens);
    visit("generated_tokens", &EngineStats::generated_tokens);
    visit("draft_tokens", &EngineStats::draft_tokens);
    visit("accepted_tokens", &EngineStats::accepted_tokens);
    visit("num_nonfinite", &EngineStats::num_nonfinite);
    visit("clipped", &EngineStats::clipped);
  }
};

}  // namespace turbomind
