#pragma once

#include <cstdint>
#include <vector>

#include "turbomind/engine/engine.h"
#include "turbomind/kv/layer_group.h"
#include "turbomind/model/decoder_scratch.h"

namespace turbomind {

// The parts of PlanMemory that the engine needs too, so that the plan and the pools cannot differ.

// Throws InvalidArgument naming the field and its flag.
void ValidateEngineConfig(const EngineConfig& config);

// What the pools store. Throws InvalidArgument for a table of another length than the model has.
KvCacheConfig CacheConfig(const ModelConfig& model, const EngineConfig& config);

// New tokens of one step at most: max_prefill_token_num, or less where all sequences are shorter.
int StepTokens(const EngineConfig& config);

// The sizes of a step.
StepLimits PlanStep(const EngineConfig& config, bool is_cpu);

// Blocks of each pool. A share of a GPU's free bytes is one of what a step leaves of them.
std::vector<int64_t> PlanBlocks(const ModelConfig& model, const EngineConfig& config,
                                int64_t free_bytes, bool is_cpu);

}  // namespace turbomind
