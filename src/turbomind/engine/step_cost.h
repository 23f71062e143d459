#pragma once

#include <cstdint>
#include <vector>

#include "turbomind/core/device_capability.h"
#include "turbomind/kv/layer_group.h"
#include "turbomind/model/model_config.h"

namespace turbomind {

// An estimate of the time of a step. The unit is the work of one token in the attention of one
// layer per position that it attends to. The scheduler uses it instead of a clock, so equal loads
// give equal plans.
struct StepCost {
  int64_t step = 0;    // of every step, whatever it computes
  int64_t token = 1;   // of a token in all linear layers
  int64_t logits = 0;  // of the logits of one row

  // Returns the cost of computing the tokens at positions [begin, end) of one sequence, without
  // logits.
  int64_t Chunk(const std::vector<LayerGroup>& groups, int64_t begin, int64_t end) const;
  // Returns the largest number of tokens from `begin`, at most `max_tokens`, that costs no more
  // than `budget`.
  int64_t TokensFor(const std::vector<LayerGroup>& groups, int64_t begin, int64_t max_tokens,
                    int64_t budget) const;
};

StepCost EstimateStepCost(const ModelConfig& model, const DeviceCapability& device);

}  // namespace turbomind
