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
constexpr int kMaxChannels = 1 << 24;

int64_t InLines(int64_t num_floats) { return CeilDiv(num_floats * int64_t{4}, int64_t{64}) * 64; }

void RequireRange(const char* field, int got, int low, int high) {
  if (got < low || got > high) {
    throw InvalidArgument(field, "is " + std::to_string(got) + ". It must be " +
                                     std::to_string(low) + " to " + std::to_string(high) + ".");
  }
}

void RequireDim(const char* field, int got) {
  RequireRange(field, got, 16, kMaxStateDim);
  if (got % 16 != 0) {
    throw InvalidArgument(field, "is " + std::to_string(got) + ". It must be a multiple of 16.");
  }
}

}  // namespace

int RecurrentConfig::NumLayers() const {
  return static_cast<int>(std::ranges::count(layers, uint8_t{1}));
}

int64_t RecurrentConfig::InputSize() const {
  switch (rule) {
    case RecurrentRule::kGatedDelta:
      return Channels() + ValueSize() + 2 * int64_t{num_value_heads};
    case RecurrentRule::kSelectiveScan:
      return Channels() + ValueSize() + num_value_heads;
    case RecurrentRule::kShortConvolution:
      return 3 * ValueSize();
  }
  return 0;
}

StateShape RecurrentConfig::State() const {
  return {.num_layers = NumLayers(),
          .exact_bytes = InLines((kernel - 1) * Channels()),
          .rows = num_value_heads * int64_t{key_dim},
          .cols = value_dim};
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
  RequireRange("recurrent.kernel", kernel, 2, kMaxConvolutionKernel);
  if (rule == RecurrentRule::kShortConvolution) {
    RequireRange("recurrent.width", width, 16, kMaxChannels);
    if (width % 16 != 0) {
      throw InvalidArgument("recurrent.width",
                            "is " + std::to_string(width) + ". It must be a multiple of 16.");
    }
    for (const int size : {num_key_heads, num_value_heads, key_dim, value_dim, norm_groups}) {
      RequireRange("recurrent.width", size, 0, 0);
    }
    return;
  }
  RequireRange("recurrent.width", width, 0, 0);
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
  RequireRange("recurrent.norm_groups", norm_groups, 0, num_value_heads);
  if (norm_groups > 0 && num_value_heads % norm_groups != 0) {
    throw InvalidArgument("recurrent.norm_groups",
                          "is " + std::to_string(norm_groups) +
                              ". It must divide recurrent.num_value_heads (" +
                              std::to_string(num_value_heads) + ").");
  }
}

}  // namespace turbomind
