#pragma once

#include <vector>

namespace turbomind {

// What differs between the layers of a model. An empty list stands for the model's own value in
// every layer, and for a layer's own K and V.
struct LayerSizes {
  std::vector<int> head_dims;
  std::vector<int> kv_heads;
  std::vector<int> intermediate_sizes;  // of the dense feed-forward
  // The layer whose K and V a layer reads: its own index, or that of an earlier layer. A layer that
  // reads those of another one computes only Q, and has no bytes in the cache.
  std::vector<int> kv_sources;
};

// Inputs that every layer has beside its hidden values (per-layer embeddings, PLE). They depend on
// the token alone: the sum of a row of a table and of a projection of the embedding, divided by the
// root of 2. A layer multiplies them with a gate and adds the projected product to its output.
struct PerLayerInputs {
  int size = 0;  // hidden_size_per_layer_input; 0: none

  bool exist() const { return size > 0; }
};

}  // namespace turbomind
