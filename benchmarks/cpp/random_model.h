#pragma once

// Decoders of published sizes with random weights, made in memory straight into a device's
// weights: BF16, experts in MXFP4.

#include <algorithm>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "kv_cells.h"
#include "random_matrix.h"
#include "turbomind/model/model_config.h"
#include "turbomind/model/weights.h"

namespace turbomind::bench {

// As in the published config.json.
inline ModelConfig Llama3Of8B() {
  ModelConfig config;
  config.num_layers = 32;
  config.hidden_size = 4096;
  config.intermediate_size = 14336;
  config.num_heads = 32;
  config.num_kv_heads = 8;
  config.head_dim = 128;
  config.vocab_size = 128256;
  config.max_position = 8192;
  config.norm_eps = 1e-5f;
  config.rope.theta = 500000.f;
  config.rope.dim = config.head_dim;
  config.windows.assign(static_cast<size_t>(config.num_layers), 0);
  return config;
}

inline ModelConfig GptOssOf20B() {
  ModelConfig config;
  config.num_layers = 24;
  config.hidden_size = 2880;
  config.num_heads = 64;
  config.num_kv_heads = 8;
  config.head_dim = 64;
  config.vocab_size = 201088;
  config.max_position = 131072;
  config.norm_eps = 1e-5f;
  config.activation = Activation::kClampedSwiglu;
  config.moe.num_experts = 32;
  config.moe.top_k = 4;
  config.moe.intermediate_size = 2880;
  config.moe.layers.assign(static_cast<size_t>(config.num_layers), 1);
  config.rope.kind = RopeKind::kYarn;
  config.rope.theta = 150000.f;
  config.rope.dim = config.head_dim;
  config.rope.factor = 32.f;
  config.rope.original_max_position = 4096;
  config.rope.beta_fast = 32.f;
  config.rope.beta_slow = 1.f;
  config.rope.truncate = false;
  for (int i = 0; i < config.num_layers; ++i) {
    config.windows.push_back(i % 2 == 0 ? 128 : 0);
  }
  return config;
}

// Two layers of either, for tests of the benchmark.
inline ModelConfig Tiny(ModelConfig config) {
  config.num_layers = 2;
  config.hidden_size = 128;
  config.intermediate_size = config.intermediate_size == 0 ? 0 : 256;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = 64;
  config.rope.dim = 64;
  config.vocab_size = 512;
  config.windows.resize(2);
  if (config.moe.num_experts > 0) {
    config.moe.num_experts = 4;
    config.moe.top_k = 2;
    config.moe.intermediate_size = 128;
    config.moe.layers.resize(2);
  }
  return config;
}

// Throws std::invalid_argument.
inline ModelConfig NamedModel(const std::string& name) {
  const bool is_gpt_oss = name == "gpt-oss-20b" || name == "tiny-gpt-oss";
  if (!is_gpt_oss && name != "llama-3-8b" && name != "tiny-llama") {
    throw std::invalid_argument("model " + name + " is unknown; use llama-3-8b or gpt-oss-20b");
  }
  const ModelConfig config = is_gpt_oss ? GptOssOf20B() : Llama3Of8B();
  return name.starts_with("tiny") ? Tiny(config) : config;
}

// Fills a builder with every weight of the config.
class RandomModel {
 public:
  RandomModel(const ModelConfig& config, Device& device)
      : config_(config), builder_(config, device, false) {}

  std::shared_ptr<const Weights> Build() {
    AddMatrix("head", config_.vocab_size, config_.hidden_size);  // the largest comes first
    AddMatrix("embedding", config_.vocab_size, config_.hidden_size);
    AddVector("final_norm", config_.hidden_size, 1.f);
    for (int i = 0; i < config_.num_layers; ++i) {
      const std::string layer = "layers." + std::to_string(i) + ".";
      AddAttention(layer);
      if (config_.moe.HasExperts(i)) {
        AddExperts(layer);
      } else {
        AddMatrix(layer + "gate", config_.intermediate_size, config_.hidden_size);
        AddMatrix(layer + "up", config_.intermediate_size, config_.hidden_size);
        AddMatrix(layer + "down", config_.hidden_size, config_.intermediate_size);
      }
    }
    return builder_.Build();
  }

 private:
  bool is_gpt_oss() const { return config_.activation == Activation::kClampedSwiglu; }

  void AddMatrix(const std::string& name, int64_t rows, int64_t cols,
                 MatrixFormat format = MatrixFormat::kBF16) {
    builder_.AddMatrix(name, random_.Source(format, rows, cols));
  }
  void AddVector(const std::string& name, int64_t size, float middle) {
    std::vector<float> values = RandomValues(size, 9);
    for (float& value : values) {
      value = middle + kDeviation * value;
    }
    builder_.AddVector(name, values.data(), size);
  }
  void AddBias(const std::string& name, int64_t size) {
    if (is_gpt_oss()) {
      AddVector(name + ".bias", size, 0.f);
    }
  }

  void AddAttention(const std::string& layer) {
    const int64_t q = int64_t{config_.num_heads} * config_.head_dim;
    const int64_t kv = int64_t{config_.num_kv_heads} * config_.head_dim;
    AddVector(layer + "attention_norm", config_.hidden_size, 1.f);
    AddVector(layer + "ffn_norm", config_.hidden_size, 1.f);
    for (const auto& [name, rows] : {std::pair("q", q), std::pair("k", kv), std::pair("v", kv)}) {
      AddMatrix(layer + name, rows, config_.hidden_size);
      AddBias(layer + name, rows);
    }
    AddMatrix(layer + "o", config_.hidden_size, q);
    AddBias(layer + "o", config_.hidden_size);
    if (is_gpt_oss()) {
      AddVector(layer + "sinks", config_.num_heads, 0.f);
    }
  }

  void AddExperts(const std::string& layer) {
    const MoeConfig& moe = config_.moe;
    AddMatrix(layer + "router", moe.num_experts, config_.hidden_size);
    AddBias(layer + "router", moe.num_experts);
    for (int i = 0; i < moe.num_experts; ++i) {
      const std::string expert = layer + "experts." + std::to_string(i) + ".";
      AddMatrix(expert + "gate_up", int64_t{2} * moe.intermediate_size, config_.hidden_size,
                MatrixFormat::kMxfp4Split);
      AddBias(expert + "gate_up", int64_t{2} * moe.intermediate_size);
      AddMatrix(expert + "down", config_.hidden_size, moe.intermediate_size,
                MatrixFormat::kMxfp4Split);
      AddBias(expert + "down", config_.hidden_size);
    }
  }

  ModelConfig config_;
  WeightsBuilder builder_;
  RandomMatrices random_;
};

}  // namespace turbomind::bench
