#include "turbomind/model/layer_cache.h"

#include <cstdint>

namespace turbomind {

std::vector<LayerCache> MakeLayerCaches(const ModelConfig& model, const KvCache& cache) {
  std::vector<LayerCache> layers;
  StateView states = cache.states();
  const StateShape shape = model.recurrent.State();
  for (int i = 0; i < model.num_layers; ++i) {
    LayerCache& layer = layers.emplace_back();
    if (model.HasAttention(i)) {
      const int source = model.KvSource(i);
      layer = {.kv = cache.LayerView(source),
               .window16 = cache.Window16LayerView(source),
               .rule = cache.rule(source),
               .k_mean = cache.KMean(source),
               .group = cache.GroupOf(source),
               .window = model.windows[static_cast<size_t>(i)]};
    }
    if (model.recurrent.Has(i)) {
      layer.convolution = layer.matrices = states;
      layer.matrices.data += shape.exact_bytes;
      states.data += shape.LayerBytes(StateFormat::kF32);
    }
  }
  return layers;
}

}  // namespace turbomind
