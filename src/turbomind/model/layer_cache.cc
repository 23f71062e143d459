#include "turbomind/model/layer_cache.h"

#include <cstdint>

namespace turbomind {

std::vector<LayerCache> MakeLayerCaches(const ModelConfig& model, const KvCache& cache) {
  std::vector<LayerCache> layers;
  StatePair states = {cache.states(), cache.checkpoints()};
  const auto take = [&states](int64_t num_bytes) {
    const StatePair taken = states;
    states.working.data += num_bytes;
    states.checkpoints.data += num_bytes;
    return taken;
  };
  for (int i = 0; i < model.num_layers; ++i) {
    LayerCache& layer = layers.emplace_back();
    if (model.HasAttention(i)) {
      layer = {.kv = cache.LayerView(i),
               .window16 = cache.Window16LayerView(i),
               .rule = cache.rule(i),
               .k_mean = cache.KMean(i),
               .group = cache.GroupOf(i),
               .window = model.windows[static_cast<size_t>(i)]};
    }
    if (model.recurrent.Has(i)) {
      layer.convolution = take(model.recurrent.ConvolutionBytes());
      layer.matrices = take(model.recurrent.MatrixBytes());
    }
  }
  return layers;
}

}  // namespace turbomind
