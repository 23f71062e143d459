#include "turbomind/model/weights.h"

#include <algorithm>
#include <utility>

#include "turbomind/core/check.h"

namespace turbomind {

int64_t LinearWeight::rows() const {
  int64_t total = 0;
  for (const auto& part : parts) {
    total += part->rows;
  }
  return total;
}

int64_t LinearWeight::cols() const { return parts.empty() ? 0 : parts.front()->cols; }

int64_t Weights::num_bytes() const {
  const auto vector_bytes = [](const std::vector<float>& v) {
    return static_cast<int64_t>(v.size() * sizeof(float));
  };
  int64_t total = vector_bytes(final_norm) + embedding->num_bytes();
  total += head ? head->num_bytes() : 0;
  for (const LayerWeights& layer : layers) {
    for (const auto* vector :
         {&layer.attention_norm, &layer.ffn_norm, &layer.q_norm, &layer.k_norm, &layer.sinks}) {
      total += vector_bytes(*vector);
    }
    for (const auto* linear : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) {
      total += vector_bytes(linear->bias);
      for (const auto& part : linear->parts) {
        total += part->num_bytes();
      }
    }
  }
  return total;
}

namespace {

struct MatrixSlot {
  std::unique_ptr<PackedMatrix>* target = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  bool required = true;
};

struct VectorSlot {
  std::vector<float>* target = nullptr;
  int64_t size = 0;
  bool required = true;
};

std::string Shape(int64_t rows, int64_t cols) {
  return "[" + std::to_string(rows) + ", " + std::to_string(cols) + "]";
}

}  // namespace

struct WeightsBuilder::Impl {
  Impl(const ModelConfig& model_config, Device& target_device, bool is_exact)
      : config(model_config), device(target_device), exact(is_exact) {
    config.Validate();
    weights->layers.resize(static_cast<size_t>(config.num_layers));
    Matrix("embedding", weights->embedding, config.vocab_size, config.hidden_size);
    Matrix("head", weights->head, config.vocab_size, config.hidden_size, false);
    Vector("final_norm", weights->final_norm, config.hidden_size);
    for (int i = 0; i < config.num_layers; ++i) {
      AddLayer("layers." + std::to_string(i) + ".", weights->layers[static_cast<size_t>(i)]);
    }
  }

  void AddLayer(const std::string& prefix, LayerWeights& layer) {
    const int64_t hidden = config.hidden_size;
    const int64_t q_rows = int64_t{config.num_heads} * config.head_dim;
    const int64_t kv_rows = int64_t{config.num_kv_heads} * config.head_dim;
    Vector(prefix + "attention_norm", layer.attention_norm, hidden);
    Vector(prefix + "ffn_norm", layer.ffn_norm, hidden);
    Vector(prefix + "q_norm", layer.q_norm, config.head_dim, false);
    Vector(prefix + "k_norm", layer.k_norm, config.head_dim, false);
    Vector(prefix + "sinks", layer.sinks, config.num_heads, false);
    Linear(layer.qkv, hidden,
           {{prefix + "q", q_rows}, {prefix + "k", kv_rows}, {prefix + "v", kv_rows}});
    Linear(layer.output, q_rows, {{prefix + "o", hidden}});
    Linear(
        layer.gate_up, hidden,
        {{prefix + "gate", config.intermediate_size}, {prefix + "up", config.intermediate_size}});
    Linear(layer.down, config.intermediate_size, {{prefix + "down", hidden}});
  }

  // A linear layer of one matrix per (name, rows), each with an optional bias.
  void Linear(LinearWeight& linear, int64_t cols,
              const std::vector<std::pair<std::string, int64_t>>& parts) {
    linear.parts.resize(parts.size());
    std::vector<std::string> bias_names;
    for (size_t i = 0; i < parts.size(); ++i) {
      const auto& [name, rows] = parts[i];
      Matrix(name, linear.parts[i], rows, cols);
      Vector(name + ".bias", biases[name + ".bias"], rows, false);
      bias_names.push_back(name + ".bias");
    }
    linear_biases.emplace_back(&linear, std::move(bias_names));
  }

  void Matrix(const std::string& name, std::unique_ptr<PackedMatrix>& target, int64_t rows,
              int64_t cols, bool required = true) {
    matrices[name] = {&target, rows, cols, required};
  }
  void Vector(const std::string& name, std::vector<float>& target, int64_t size,
              bool required = true) {
    vectors[name] = {&target, size, required};
  }

  // The biases of a layer's parts, one after the other; a part without one has zeros.
  void JoinBiases() {
    for (auto& [linear, names] : linear_biases) {
      bool any = false;
      for (const std::string& name : names) {
        any = any || !biases[name].empty();
      }
      for (const std::string& name : names) {
        const std::vector<float>& bias = biases[name];
        const auto size = any ? static_cast<size_t>(vectors[name].size) : 0;
        linear->bias.insert(linear->bias.end(), bias.begin(), bias.end());
        linear->bias.insert(linear->bias.end(), size - bias.size(), 0.f);
      }
    }
  }

  void RequireComplete() const {
    std::vector<std::string> missing;
    for (const auto& [name, slot] : matrices) {
      if (slot.required && *slot.target == nullptr) {
        missing.push_back(name);
      }
    }
    for (const auto& [name, slot] : vectors) {
      if (slot.required && slot.target->empty()) {
        missing.push_back(name);
      }
    }
    for (size_t i = 0; i < weights->layers.size(); ++i) {
      const LayerWeights& layer = weights->layers[i];
      if (layer.q_norm.empty() != layer.k_norm.empty()) {
        missing.push_back("layers." + std::to_string(i) +
                          (layer.q_norm.empty() ? ".q_norm" : ".k_norm"));
      }
    }
    if (missing.empty()) {
      return;
    }
    constexpr size_t kNamed = 8;
    std::string text = "weights: missing " + std::to_string(missing.size()) + ":";
    std::sort(missing.begin(), missing.end());
    for (size_t i = 0; i < std::min(kNamed, missing.size()); ++i) {
      text += (i == 0 ? " " : ", ") + missing[i];
    }
    throw InvalidArgument(text + (missing.size() > kNamed ? ", ..." : ""));
  }

  ModelConfig config;
  Device& device;
  bool exact;
  std::shared_ptr<Weights> weights = std::make_shared<Weights>();
  std::unordered_map<std::string, MatrixSlot> matrices;
  std::unordered_map<std::string, VectorSlot> vectors;
  std::unordered_map<std::string, std::vector<float>> biases;  // by name, until JoinBiases
  std::vector<std::pair<LinearWeight*, std::vector<std::string>>> linear_biases;
};

WeightsBuilder::WeightsBuilder(const ModelConfig& config, Device& device, bool exact)
    : impl_(std::make_unique<Impl>(config, device, exact)) {}

WeightsBuilder::~WeightsBuilder() = default;

void WeightsBuilder::AddMatrix(std::string_view name, const MatrixSource& source) {
  const std::string key(name);
  if (impl_->weights == nullptr) {
    throw InvalidArgument("weights: already built, got another matrix " + key);
  }
  const auto found = impl_->matrices.find(key);
  if (found == impl_->matrices.end()) {
    throw InvalidArgument("weights: unknown matrix " + key);
  }
  const MatrixSlot& slot = found->second;
  if (*slot.target != nullptr) {
    throw InvalidArgument("weights: matrix " + key + " given twice");
  }
  if (source.rows != slot.rows || source.cols != slot.cols) {
    throw InvalidArgument("weights: matrix " + key + ": got shape " +
                          Shape(source.rows, source.cols) + ", the config wants " +
                          Shape(slot.rows, slot.cols));
  }
  *slot.target = impl_->device.PackMatrix(source, impl_->exact);
}

void WeightsBuilder::AddVector(std::string_view name, const float* data, int64_t size) {
  const std::string key(name);
  if (impl_->weights == nullptr) {
    throw InvalidArgument("weights: already built, got another vector " + key);
  }
  const auto found = impl_->vectors.find(key);
  if (found == impl_->vectors.end()) {
    throw InvalidArgument("weights: unknown vector " + key);
  }
  const VectorSlot& slot = found->second;
  if (!slot.target->empty()) {
    throw InvalidArgument("weights: vector " + key + " given twice");
  }
  if (size != slot.size) {
    throw InvalidArgument("weights: vector " + key + ": got " + std::to_string(size) +
                          " values, the config wants " + std::to_string(slot.size));
  }
  slot.target->assign(data, data + size);
}

std::shared_ptr<const Weights> WeightsBuilder::Build() {
  if (impl_->weights == nullptr) {
    throw InvalidArgument("weights: already built");
  }
  impl_->RequireComplete();
  impl_->JoinBiases();
  return std::exchange(impl_->weights, nullptr);
}

}  // namespace turbomind
