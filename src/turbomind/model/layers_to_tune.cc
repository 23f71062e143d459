#include "turbomind/model/layers_to_tune.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>

namespace turbomind {
namespace {

void AddExperts(const std::vector<ExpertWeights>& experts, LinearWeight ExpertWeights::*linear,
                int max_rows, std::vector<LayerToTune>* layers) {
  // Each part has a call of its own. At most every expert gets every token.
  const int64_t rows = int64_t{max_rows} * static_cast<int64_t>(experts.size());
  const size_t num_parts = experts.empty() ? 0 : (experts[0].*linear).parts.size();
  for (size_t part = 0; part < num_parts; ++part) {
    LayerToTune layer = {.parts = {}, .grouped = true};
    layer.gated = (experts[0].*linear).is_gated;
    layer.max_rows = static_cast<int>(std::min<int64_t>(rows, std::numeric_limits<int32_t>::max()));
    for (const ExpertWeights& expert : experts) {
      layer.parts.push_back({.weight = (expert.*linear).parts[part].get()});
    }
    layers->push_back(std::move(layer));
  }
}

}  // namespace

std::vector<LayerToTune> LayersToTune(const Weights& weights, int max_rows, int max_logit_rows) {
  std::vector<LayerToTune> layers;
  for (const LayerWeights& layer : weights.layers) {
    for (const LinearWeight* linear : layer.shared_linears()) {
      if (linear->empty()) {
        continue;
      }
      LayerToTune& one = layers.emplace_back(LayerToTune{.parts = {},
                                                         .max_rows = max_rows,
                                                         .normed = linear->is_normed,
                                                         .gated = linear->is_gated});
      for (const auto& part : linear->parts) {
        one.parts.push_back({.weight = part.get()});
      }
    }
    AddExperts(layer.moe.experts, &ExpertWeights::gate_up, max_rows, &layers);
    AddExperts(layer.moe.experts, &ExpertWeights::down, max_rows, &layers);
  }
  layers.push_back({.parts = {{.weight = &weights.output_head()}},
                    .max_rows = std::min(max_rows, max_logit_rows),
                    .normed = true});
  return layers;
}

}  // namespace turbomind
