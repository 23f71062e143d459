#pragma once

#include <cstdint>
#include <vector>

#include "turbomind/engine/engine.h"
#include "turbomind/kv/layer_group.h"

namespace turbomind {

// The parts of PlanMemory that the engine needs too, so that the plan and the pools cannot differ.

// Rows of logits computed at a time: a few MB at any vocabulary, and enough rows to share each pass
// over the head's weights.
inline constexpr int kLogitRows = 32;

// Throws InvalidArgument naming the field and its flag.
void ValidateEngineConfig(const EngineConfig& config);

// What the pools store. Throws InvalidArgument for a table of another length than the model has.
KvCacheConfig CacheConfig(const ModelConfig& model, const EngineConfig& config);

// New tokens of one step at most: max_prefill_token_num, or less where all sequences are shorter.
int StepTokens(const EngineConfig& config);

// Blocks of each pool.
std::vector<int64_t> PlanBlocks(const std::vector<LayerGroup>& groups, const EngineConfig& config,
                                int64_t free_bytes, bool is_cpu);

}  // namespace turbomind
