#include "turbomind/model/recurrent_config.h"

#include <algorithm>
#include <string>

#include "turbomind/core/ceil_div.h"
#include "turbomind/core/check.h"
#include "turbomind/ops/recurrent_params.h"

namespace turbomind {
namespace {

// Above any real model. These limits keep products of the sizes within 64 bits.
constexpr int kMaxHeads = 65536;
constexpr int kMaxDim = 1024;

int64_t InLines(int64_t num_floats) { return CeilDiv(num_floats * int64_t{4}, int64_t{64}) * 64; }

void RequireRange(const char* field, int got, int low, int high) {
  if (got < low || got > high) {
    throw InvalidArgument(field, "is " + std::to_string(got) + ". It must be " +
                                     std::to_string(low) + " to " + std::to_string(high) + ".");
  }
}

void RequireDim(const char* field, int got) {
  RequireRange(field, got, 16, kMaxDim);
  if (got % 16 != 0) {
    throw InvalidArgument(field, "is " + std::to_string(got) + ". It must be a multiple of 16.");
  }
}

}  // namespace

int RecurrentConfig::NumLayers() const {
  return static_cast<int>(std::ranges::count(layers, uint8_t{1}));
}

int64_t RecurrentConfig::ConvolutionBytes() const { return InLines((kernel - 1) * Channels()); }

int64_t RecurrentConfig::MatrixBytes() const { return InLines(ValueSize() * key_dim); }

int64_t RecurrentConfig::StateBytes() const {
  return NumLayers() * (ConvolutionBytes() + MatrixBytes());
}

void RecurrentConfig::Validate(int num_model_layers) const {
  if (layers.empty()) {
    return;
  }
  if (layers.size() != static_cast<size_t>(num_model_layers)) {
    throw InvalidArgument("recurrent.layers", "has " + std::to_string(layers.size()) +
                                                  " entries. It must have one per layer (" +
                                                  std::to_string(num_model_layers) + ").");
  }
  for (const uint8_t layer : layers) {
    RequireRange("recurrent.layers", layer, 0, 1);
  }
  if (!HasAny()) {
    return;
  }
  if (NumLayers() == num_model_layers) {
    throw InvalidArgument("recurrent.layers",
                          "has no layer with attention. The model must have at least one.");
  }
  RequireRange("recurrent.num_key_heads", num_key_heads, 1, kMaxHeads);
  RequireRange("recurrent.num_value_heads", num_value_heads, 1, kMaxHeads);
  if (num_value_heads % num_key_heads != 0) {
    throw InvalidArgument("recurrent.num_value_heads",
                          "is " + std::to_string(num_value_heads) +
                              ". It must be a multiple of recurrent.num_key_heads (" +
                              std::to_string(num_key_heads) + ").");
  }
  RequireDim("recurrent.key_dim", key_dim);
  RequireDim("recurrent.value_dim", value_dim);
  RequireRange("recurrent.kernel", kernel, 2, kMaxConvolutionKernel);
}

}  // namespace turbomind
