#include "turbomind/model/model_config.h"

#include <cmath>

#include "turbomind/core/check.h"
#include "turbomind/ops/rope.h"

namespace turbomind {
namespace {

// Above any real model; keeps products of two sizes inside 64 bits.
constexpr int64_t kMaxLayers = 4096;
constexpr int64_t kMaxHeads = 65536;
constexpr int64_t kMaxWidth = int64_t{1} << 24;

void RequireSize(const char* field, int64_t got, int64_t most) {
  if (got < 1 || got > most) {
    throw InvalidArgument(std::string(field) + ": got " + std::to_string(got) + ", want 1 to " +
                          std::to_string(most));
  }
}

void Require(bool ok, const std::string& text) {
  if (!ok) {
    throw InvalidArgument(text);
  }
}

}  // namespace

void ModelConfig::Validate() const {
  RequireSize("num_layers", num_layers, kMaxLayers);
  RequireSize("hidden_size", hidden_size, kMaxWidth);
  RequireSize("intermediate_size", intermediate_size, kMaxWidth);
  RequireSize("num_heads", num_heads, kMaxHeads);
  RequireSize("num_kv_heads", num_kv_heads, kMaxHeads);
  RequireSize("head_dim", head_dim, 1024);
  RequireSize("vocab_size", vocab_size, kMaxWidth);
  RequireSize("max_position", max_position, int64_t{1} << 30);
  Require(num_heads % num_kv_heads == 0, "num_heads: got " + std::to_string(num_heads) +
                                             ", want a multiple of num_kv_heads (" +
                                             std::to_string(num_kv_heads) + ")");
  Require(std::isfinite(norm_eps) && norm_eps >= 0.f,
          "norm_eps: got " + std::to_string(norm_eps) + ", want a finite value of at least 0");
  Require(std::isfinite(softmax_scale) && softmax_scale >= 0.f,
          "softmax_scale: got " + std::to_string(softmax_scale) +
              ", want a positive value, or 0 for 1 / sqrt(head_dim)");
  Require(windows.size() == static_cast<size_t>(num_layers),
          "windows: got " + std::to_string(windows.size()) + " entries, want one per layer (" +
              std::to_string(num_layers) + ")");
  for (int window : windows) {
    Require(window >= 0, "windows: got " + std::to_string(window) +
                             ", want a positive number of tokens, or 0 for full attention");
  }
  const RopeTable checked(rope);
  Require(rope.kind == RopeKind::kNone || rope.dim <= head_dim,
          "rope.dim: got " + std::to_string(rope.dim) + ", want at most head_dim (" +
              std::to_string(head_dim) + ")");
}

}  // namespace turbomind
