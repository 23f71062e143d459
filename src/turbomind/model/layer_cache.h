#pragma once

#include <vector>

#include "turbomind/kv/kv_cache.h"
#include "turbomind/model/model_config.h"
#include "turbomind/ops/recurrent_params.h"

namespace turbomind {

// The cache of one layer: where this step's K and V, or its states, are read and written. A layer
// without K and V of its own has the views of the layer whose it reads (ModelConfig::KvSource).
struct LayerCache {
  KvLayerView kv;
  KvLayerView window16;  // data is null if there is no 16-bit window
  PrecisionWindow rule;
  const float* k_mean = nullptr;
  int group = -1;              // index of the batch view; -1: the layer has no attention
  int window = 0;              // as in kv/sliding_window.h
  StateView convolution = {};  // of a recurrent layer
  StateView matrices = {};     // same

  bool has_attention() const { return group >= 0; }
  // Returns the pool that a step's K and V are written to.
  const KvLayerView& written() const { return window16.data != nullptr ? window16 : kv; }
};

// Returns the cache of every layer.
std::vector<LayerCache> MakeLayerCaches(const ModelConfig& model, const KvCache& cache);

}  // namespace turbomind
