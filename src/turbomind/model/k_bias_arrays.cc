#include "turbomind/model/k_bias_arrays.h"

#include <algorithm>
#include <utility>

#include "turbomind/core/ceil_div.h"
#include "turbomind/core/check.h"
#include "turbomind/kv/layout.h"
#include "turbomind/model/decoder.h"
#include "turbomind/ops/hadamard.h"

namespace turbomind {
namespace {

// Returns whether blocks have K offsets. Without them, keys have their whole bias.
bool HasOffsets(const LayerCache& cache) {
  return cache.kv.HasKOffset() || cache.written().HasKOffset();
}

void RotateRows(std::vector<float>* rows, int head_dim) {
  const int size = RotationSize(head_dim);
  for (size_t i = 0; i < rows->size(); i += static_cast<size_t>(size)) {
    RotateRun(rows->data() + i, size);
  }
}

// Returns the places of `pairs` among `known`, to which new ones are added.
std::vector<int32_t> PlacesOf(const std::vector<int32_t>& pairs, std::vector<int32_t>* known) {
  std::vector<int32_t> places;
  for (const int32_t pair : pairs) {
    const auto found = std::find(known->begin(), known->end(), pair);
    places.push_back(static_cast<int32_t>(found - known->begin()));
    if (found == known->end()) {
      known->push_back(pair);
    }
  }
  return places;
}

}  // namespace

KBiasArrays::KBiasArrays(const DecoderConfig& config, const Weights& weights,
                         std::span<const RopeTable> ropes, DeviceMemory& device)
    : num_positions_(CeilDiv(int64_t{config.max_positions}, kTileTokens) * kTileTokens) {
  const ModelConfig& model = config.model;
  std::vector<std::vector<int32_t>> known(ropes.size());
  for (size_t i = 0; i < config.layers.size(); ++i) {
    const LayerCache& cache = config.layers[i];
    Layer& layer = layers_.emplace_back();
    const VectorWeight& qkv = weights.layers[i].qkv.bias;
    layer.of_weights = qkv.data;
    if (!HasOffsets(cache)) {
      continue;
    }
    const bool has_base = cache.written().HasKOffset();
    Check(model.k_bias || !has_base,
          "a pool whose keys are written with an offset needs a model with k_bias");
    if (!model.k_bias) {
      continue;
    }
    std::vector<float> bias = ReadKBias(model, weights.layers[i], device);
    const int index = model.RopeOf(static_cast<int>(i));
    const RopeTable* rope = index < 0 ? nullptr : &ropes[static_cast<size_t>(index)];
    if (rope != nullptr && rope->enabled()) {
      Check(num_positions_ > 0, "a bias of K beside K offsets needs max_positions");
      layer.rope = static_cast<size_t>(index);
      FastPairs fast = TakeFastPairs(&bias, model.head_dim, *rope, cache.kv.block_seq_len);
      layer.num_pairs = fast.num_pairs;
      if (config.rotate_k) {
        RotateRows(&fast.directions, model.head_dim);
      }
      const std::vector<int32_t> waves_of = PlacesOf(fast.pairs, &known[layer.rope]);
      layer.directions = {device, fast.directions.data(),
                          static_cast<int64_t>(fast.directions.size())};
      layer.waves_of = {device, waves_of.data(), static_cast<int64_t>(waves_of.size())};
    }
    if (layer.num_pairs > 0) {
      std::vector<float> all(static_cast<size_t>(qkv.size));
      device.Copy(all.data(), qkv.data, all.size() * sizeof(float));
      device.Synchronize();
      std::copy(bias.begin(), bias.end(), all.begin() + int64_t{model.num_heads} * model.head_dim);
      layer.qkv = {device, all.data(), static_cast<int64_t>(all.size())};
    }
    if (has_base) {
      base_block_seq_len_ = cache.written().block_seq_len;
      bias = MakeKBase(std::move(bias), model.head_dim, rope, base_block_seq_len_);
      layer.base = {device, bias.data(), static_cast<int64_t>(bias.size())};
    }
  }
  for (size_t i = 0; i < ropes.size(); ++i) {
    const std::vector<float> waves = MakeWaves(known[i], ropes[i], num_positions_);
    waves_.emplace_back(device, waves.data(), static_cast<int64_t>(waves.size()));
  }
}

const float* KBiasArrays::qkv_bias(int layer) const {
  const Layer& of = layers_[static_cast<size_t>(layer)];
  return of.qkv.empty() ? of.of_weights : of.qkv.data();
}

FastBias KBiasArrays::fast(int layer) const {
  const Layer& of = layers_[static_cast<size_t>(layer)];
  if (of.num_pairs == 0) {
    return {};
  }
  return {.num_pairs = of.num_pairs,
          .directions = of.directions.data(),
          .waves_of = of.waves_of.data(),
          .waves = waves_[of.rope].data(),
          .num_positions = num_positions_};
}

}  // namespace turbomind
