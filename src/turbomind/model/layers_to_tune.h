#pragma once

#include <vector>

#include "turbomind/model/weights.h"
#include "turbomind/ops/tuning.h"

namespace turbomind {

// Returns the calls of linear layers that a step makes, for Device::Tune. Their parts are owned by
// `weights`. A step has up to `max_rows` tokens and the device's max_logit_rows rows of logits.
std::vector<LayerToTune> LayersToTune(const Weights& weights, int max_rows, int max_logit_rows);

}  // namespace turbomind
