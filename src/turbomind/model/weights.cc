#include "turbomind/model/weights.h"

#include <algorithm>
#include <deque>
#include <utility>

#include "turbomind/core/check.h"
#include "turbomind/model/weight_slots.h"

namespace turbomind {

namespace {

constexpr size_t kVectorAlignment = 16;

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
    Norm("final_norm", weights->final_norm);
    for (int i = 0; i < config.num_layers; ++i) {
      const std::string prefix = "layers." + std::to_string(i) + ".";
      LayerWeights& layer = weights->layers[static_cast<size_t>(i)];
      AddNorms(prefix, i, layer);
      if (config.recurrent.Has(i)) {
        AddRecurrent(prefix + "recurrent.", layer.recurrent);
        layer.recurrent.input.is_normed = NormsMixerInput(i);
      }
      if (config.HasAttention(i)) {
        AddAttention(prefix, i, layer);
        std::vector<int>& dims = weights->head_dims;
        if (std::ranges::find(dims, config.HeadDim(i)) == dims.end()) {
          dims.push_back(config.HeadDim(i));
        }
      }
      const std::vector<float> ones(static_cast<size_t>(config.HeadDim(i)), 1.f);
      if (config.norm.qk_unit && config.RopeOf(i) >= 0 && config.HasAttention(i)) {
        vectors[prefix + "q_norm"].values = vectors[prefix + "k_norm"].values = ones;
      }
      if (config.norm.v_unit && config.OwnsKv(i)) {
        Vector(prefix + "v_norm", layer.v_norm, config.HeadDim(i));
        vectors[prefix + "v_norm"].values = ones;
      }
      if (config.moe.HasExperts(i)) {
        AddExperts(prefix, layer.moe);
      }
      if (config.HasDenseFeedForward(i)) {
        AddFeedForward(prefix, i, layer);
      }
      if (config.layer_scale) {
        vectors[prefix + "scale"] = {nullptr, 1, true};
      }
    }
    if (config.per_layer.exist()) {
      AddPerLayerInputs();
    }
  }

  void AddPerLayerInputs() {
    const int64_t size = config.per_layer.size;
    const int64_t width = config.num_layers * size;
    Matrix("per_layer_embedding", weights->per_layer_embedding, config.vocab_size, width);
    Linear(weights->per_layer_projection, config.hidden_size, {{"per_layer_projection", width}});
    Vector("per_layer_norm", weights->per_layer_norm, size);
    for (int i = 0; i < config.num_layers; ++i) {
      const std::string prefix = "layers." + std::to_string(i) + ".per_layer_";
      LayerWeights& layer = weights->layers[static_cast<size_t>(i)];
      Linear(layer.per_layer_gate, config.hidden_size, {{prefix + "gate", size}});
      Linear(layer.per_layer_up, size, {{prefix + "up", config.hidden_size}});
      Norm(prefix + "output_norm", layer.per_layer_output_norm);
    }
  }

  void AddNorms(const std::string& prefix, int index, LayerWeights& layer) {
    const bool mixes = config.HasMixer(index);
    const bool feeds = config.HasFeedForward(index);
    if (config.norm.inputs && mixes) {
      Norm(prefix + "attention_norm", layer.attention_norm);
    }
    if (config.norm.inputs && feeds && !config.parallel) {
      Norm(prefix + "ffn_norm", layer.ffn_norm);
    }
    if (config.norm.outputs && mixes) {
      Norm(prefix + "attention_output_norm", layer.attention_output_norm);
    }
    if (config.norm.outputs && feeds) {
      Norm(prefix + "ffn_output_norm", layer.ffn_output_norm);
    }
  }

  void AddLatents(const std::string& prefix, LatentWeights& layer) {
    const LatentConfig& latent = config.latent;
    const int64_t rank = config.head_dim;
    const int64_t hidden = config.hidden_size;
    if (latent.q_rank > 0) {
      Linear(layer.q_down, hidden, {{prefix + "q_a", latent.q_rank}});
      Vector(prefix + "q_a_norm", layer.q_norm, latent.q_rank);
    }
    Linear(layer.q, latent.q_rank > 0 ? latent.q_rank : hidden,
           {{prefix + "q", config.QuerySize()}});
    Linear(layer.down, hidden, {{prefix + "kv_a", rank + latent.rope_dim}});
    Vector(prefix + "kv_a_norm", layer.norm, rank);
    const auto heads = static_cast<size_t>(config.num_heads);
    layer.k_matrices.parts.resize(heads);
    layer.v_matrices.parts.resize(heads);
    for (size_t head = 0; head < heads; ++head) {
      const std::string name = std::to_string(head);
      Matrix(prefix + "k_b." + name, layer.k_matrices.parts[head], rank, latent.nope_dim);
      Matrix(prefix + "v_b." + name, layer.v_matrices.parts[head], latent.value_dim, rank);
    }
  }

  // Returns whether the norm of a layer's mixers has one reader, which computes it.
  bool NormsMixerInput(int index) const {
    const bool has_two_mixers = config.recurrent.Has(index) && config.HasAttention(index);
    return config.norm.inputs && !has_two_mixers && !config.attention_gate && !config.parallel;
  }

  void AddAttention(const std::string& prefix, int index, LayerWeights& layer) {
    if (config.latent.exists()) {
      AddLatents(prefix + "latent.", layer.latent);
      Linear(layer.output, config.AttendedSize(), {{prefix + "o", config.hidden_size}});
      return;
    }
    const int64_t hidden = config.hidden_size;
    const int64_t q_rows = config.QSize(index);
    const int64_t kv_rows = config.KvSize(index);
    const int head_dim = config.HeadDim(index);
    const bool all_heads = config.norm.qk_all_heads;
    std::vector<std::pair<std::string, int64_t>> parts = {{prefix + "q", q_rows}};
    Vector(prefix + "q_norm", layer.q_norm, all_heads ? q_rows : head_dim, false);
    if (config.OwnsKv(index)) {
      Vector(prefix + "k_norm", layer.k_norm, all_heads ? kv_rows : head_dim, false);
      parts.insert(parts.end(), {{prefix + "k", kv_rows}, {prefix + "v", kv_rows}});
    }
    Vector(prefix + "sinks", layer.sinks, config.num_heads, false);
    Linear(layer.qkv, hidden, parts);
    layer.qkv.is_normed = NormsMixerInput(index);
    if (config.attention_gate) {
      Linear(layer.attention_gate, hidden, {{prefix + "attention_gate", q_rows}});
    }
    Linear(layer.output, q_rows, {{prefix + "o", hidden}});
  }

  void AddRecurrent(const std::string& prefix, RecurrentWeights& layer) {
    const RecurrentConfig& shape = config.recurrent;
    const int64_t heads = shape.num_value_heads;
    const int64_t values = shape.ValueSize();
    Vector(prefix + "convolution", layer.convolution, shape.kernel * shape.Channels());
    Vector(prefix + "convolution.bias", layer.convolution_bias, shape.Channels(), false);
    Linear(layer.output, values, {{prefix + "o", config.hidden_size}});
    const auto named = [&](const char* name, int64_t rows) {
      return std::pair(prefix + name, rows);
    };
    const auto q = named("q", shape.KeySize());
    const auto k = named("k", shape.KeySize());
    const auto v = named("v", values);
    const auto z = named("z", values);
    switch (shape.rule) {
      case RecurrentRule::kGatedDelta:
        Linear(layer.input, config.hidden_size, {q, k, v, z, named("b", heads), named("a", heads)});
        break;
      case RecurrentRule::kSelectiveScan:
        Linear(layer.input, config.hidden_size, {v, k, q, z, named("a", heads)});
        Vector(prefix + "skip", layer.skip, heads);
        break;
      case RecurrentRule::kShortConvolution:
        Linear(layer.input, config.hidden_size,
               {v, named("in_gate", values), named("out_gate", values)});
        return;
    }
    Vector(prefix + "decay", layer.decay, heads);
    Vector(prefix + "dt_bias", layer.dt_bias, heads);
    if (shape.norm_groups > 0) {
      const bool is_shared = shape.rule == RecurrentRule::kGatedDelta;  // by all heads
      vectors[prefix + "norm"] = {&layer.norm, is_shared ? shape.value_dim : values, true,
                                  is_shared ? shape.num_value_heads : 1};
    }
  }

  // Returns the matrices of a feed-forward's input: only up if it has no gate.
  std::vector<std::pair<std::string, int64_t>> GateAndUp(const std::string& prefix,
                                                         int64_t rows) const {
    if (config.gated) {
      return {{prefix + "gate", rows}, {prefix + "up", rows}};
    }
    return {{prefix + "up", rows}};
  }

  void AddFeedForward(const std::string& prefix, int index, LayerWeights& layer) {
    const int64_t inner = config.IntermediateSize(index);
    Linear(layer.gate_up, config.hidden_size, GateAndUp(prefix, inner));
    layer.gate_up.is_normed = config.norm.inputs && !config.parallel;
    layer.gate_up.is_gated = config.gated;
    Linear(layer.down, inner, {{prefix + "down", config.hidden_size}});
  }

  void AddExperts(const std::string& prefix, MoeWeights& moe) {
    const int64_t hidden = config.hidden_size;
    Linear(moe.router, hidden, {{prefix + "router", config.moe.num_experts}});
    moe.router.is_normed = config.norm.inputs && !config.parallel && !config.moe.beside_dense;
    if (config.moe.beside_dense) {
      Vector(prefix + "router.expert_scale", moe.expert_scale, config.moe.num_experts);
      Norm(prefix + "router.norm", moe.router_norm);
      Norm(prefix + "expert_norm", moe.norm);
      Norm(prefix + "expert_output_norm", moe.output_norm);
      Norm(prefix + "dense_output_norm", moe.dense_output_norm);
    }
    matrices[prefix + "router"].exact = true;
    Vector(prefix + "router.score_bias", moe.score_bias, config.moe.num_experts, false);
    if (const int64_t latent = config.moe.latent_size; latent > 0) {
      Linear(moe.latent_down, hidden, {{prefix + "latent_down", latent}});
      Linear(moe.latent_up, latent, {{prefix + "latent_up", hidden}});
    }
    moe.experts.resize(static_cast<size_t>(config.moe.num_experts));
    for (size_t e = 0; e < moe.experts.size(); ++e) {
      AddExpert(prefix + "experts." + std::to_string(e) + ".", moe.experts[e]);
    }
    if (const int64_t shared = config.moe.shared_intermediate_size; shared > 0) {
      const std::string name = prefix + "shared.";
      Linear(moe.shared_gate_up, hidden, GateAndUp(name, shared));
      moe.shared_gate_up.is_gated = config.gated;
      Linear(moe.shared_down, shared, {{name + "down", hidden}});
      if (config.moe.shared_gate) {
        Linear(moe.shared_router, hidden, {{name + "router", 1}});
        matrices[name + "router"].exact = true;
      }
    }
  }

  // Accepts gate and up in either form. The required form is known once all matrices are added.
  void AddExpert(const std::string& prefix, ExpertWeights& expert) {
    const int64_t hidden = config.moe.latent_size > 0 ? config.moe.latent_size : config.hidden_size;
    const int64_t inner = config.moe.intermediate_size;
    Linear(expert.gate_up, hidden, GateAndUp(prefix, inner));
    Linear(expert.down, inner, {{prefix + "down", hidden}});
    experts.push_back({&expert, prefix, LinearWeight{}});
    if (!config.gated) {
      return;
    }
    Linear(experts.back().interleaved, hidden, {{prefix + "gate_up", 2 * inner}});
    experts.back().interleaved.is_gated = true;
    for (const char* name : {"gate", "up", "gate_up"}) {
      matrices[prefix + name].required = false;
    }
  }

  // Declares a linear layer with one matrix per (name, rows), each with an optional bias.
  void Linear(LinearWeight& linear, int64_t cols,
              const std::vector<std::pair<std::string, int64_t>>& parts) {
    linear.parts.resize(parts.size());
    std::vector<std::string> bias_names;
    for (size_t i = 0; i < parts.size(); ++i) {
      const auto& [name, rows] = parts[i];
      Matrix(name, linear.parts[i], rows, cols);
      vectors[name + ".bias"] = {nullptr, rows, false};
      bias_names.push_back(name + ".bias");
    }
    linear_biases.emplace_back(&linear, std::move(bias_names));
  }

  void Matrix(const std::string& name, std::unique_ptr<PackedMatrix>& target, int64_t rows,
              int64_t cols, bool required = true) {
    matrices[name] = {&target, rows, cols, required};
  }
  void Norm(const std::string& name, NormWeight& target) {
    Vector(name, target.weight, config.hidden_size);
    Vector(name + ".bias", target.bias, config.hidden_size, false);
  }
  void Vector(const std::string& name, VectorWeight& target, int64_t size, bool required = true) {
    vectors[name] = {&target, size, required};
  }

  bool HasVector(const std::string& name) const {
    const auto found = vectors.find(name);
    return found != vectors.end() && !found->second.values.empty();
  }

  // Concatenates the biases of a layer's parts. A part without a bias gets zeros.
  void JoinBiases(std::vector<VectorUpload>& uploads) {
    for (auto& [linear, names] : linear_biases) {
      if (std::ranges::none_of(names, [this](const auto& name) { return HasVector(name); })) {
        continue;
      }
      VectorUpload joined = {&linear->bias, {}};
      for (const std::string& name : names) {
        VectorSlot& slot = vectors.at(name);
        slot.values.resize(static_cast<size_t>(slot.size));
        joined.values.insert(joined.values.end(), slot.values.begin(), slot.values.end());
      }
      uploads.push_back(std::move(joined));
    }
  }

  // Uploads all vectors to the device in one array, each at a multiple of kVectorAlignment values.
  void Upload() {
    std::vector<VectorUpload> uploads;
    JoinBiases(uploads);
    for (auto& [name, slot] : vectors) {
      if (slot.target != nullptr && !slot.values.empty()) {
        VectorUpload& upload = uploads.emplace_back(slot.target);
        for (int i = 0; i < slot.repeats; ++i) {
          upload.values.insert(upload.values.end(), slot.values.begin(), slot.values.end());
        }
      }
    }
    std::vector<float> all;
    std::vector<size_t> begins;
    for (const VectorUpload& upload : uploads) {
      begins.push_back(all.size());
      all.insert(all.end(), upload.values.begin(), upload.values.end());
      all.resize((all.size() + kVectorAlignment - 1) / kVectorAlignment * kVectorAlignment);
    }
    weights->vectors = DeviceArray(device, all.data(), static_cast<int64_t>(all.size()));
    for (size_t i = 0; i < uploads.size(); ++i) {
      *uploads[i].target = {weights->vectors.data() + begins[i],
                            static_cast<int64_t>(uploads[i].values.size())};
    }
  }

  bool Has(const std::string& matrix) const {
    const auto found = matrices.find(matrix);
    return found != matrices.end() && *found->second.target != nullptr;
  }

  bool Interleaved() const {
    return std::ranges::any_of(
        experts, [this](const ExpertSlot& slot) { return Has(slot.prefix + "gate_up"); });
  }

  // Returns the names of an expert's gate and up matrices in the given form. Without gates there is
  // only one.
  std::vector<std::string> GateNames(const ExpertSlot& slot, bool interleaved) const {
    if (!config.gated) {
      return {slot.prefix + "up"};
    }
    if (interleaved) {
      return {slot.prefix + "gate_up"};
    }
    return {slot.prefix + "gate", slot.prefix + "up"};
  }

  void AddMissingOfExperts(std::vector<std::string>& missing) const {
    if (!config.gated) {
      return;  // they are required
    }
    const bool interleaved = Interleaved();
    for (const ExpertSlot& slot : experts) {
      for (const std::string& name : GateNames(slot, interleaved)) {
        if (!Has(name)) {
          missing.push_back(name);
        }
      }
    }
  }

  void RequireNotBuilt(const std::string& got = "") const {
    if (weights == nullptr) {
      throw InvalidArgument("The weights are already built" + got);
    }
  }

  void RequireOneForm() const {
    if (!config.gated) {
      return;
    }
    const bool interleaved = Interleaved();
    for (const ExpertSlot& slot : experts) {
      for (const std::string& name : GateNames(slot, !interleaved)) {
        if (Has(name) || HasVector(name + ".bias")) {
          throw InvalidArgument(
              "The weights contain " + name + (Has(name) ? "" : ".bias") +
              ", but other experts have " +
              (interleaved ? "gate_up. Use one form." : "gate and up. Use one form."));
        }
      }
    }
  }

  // One call handles rows of several experts and supports only one format.
  void RequireOneFormat() const {
    std::unordered_map<std::string, std::pair<std::string, MatrixFormat>>
        first;  // by layer and part
    for (const ExpertSlot& slot : experts) {
      const size_t layer_end = slot.prefix.find(".experts.");
      for (const char* part : {"gate", "up", "gate_up", "down"}) {
        const std::string name = slot.prefix + part;
        if (!Has(name)) {
          continue;
        }
        const MatrixFormat format = (*matrices.at(name).target)->format;
        const auto [found, is_first] =
            first.try_emplace(slot.prefix.substr(0, layer_end + 1) + part, name, format);
        if (found->second.second != format) {
          throw InvalidArgument(
              "Weights " + name + " and " + found->second.first +
              " have different formats. Use one format for the experts of a layer.");
        }
      }
    }
  }

  // Lets the decoder pass the matrices of all heads at once.
  void ViewHeads() {
    for (LayerWeights& layer : weights->layers) {
      for (const auto& [views, linear] :
           {std::pair{&layer.latent.k_up, &layer.latent.k_matrices},
            std::pair{&layer.latent.v_up, &layer.latent.v_matrices}}) {
        for (const auto& part : linear->parts) {
          views->push_back({part.get()});
        }
      }
    }
  }

  // Sets the factors of layers, which the host reads.
  void SetScales() {
    for (size_t i = 0; config.layer_scale && i < weights->layers.size(); ++i) {
      weights->layers[i].scale =
          vectors.at("layers." + std::to_string(i) + ".scale").values.front();
    }
  }

  // Makes the interleaved form visible to the decoder. Called after Upload.
  void ChooseForm() {
    if (Interleaved()) {
      for (ExpertSlot& slot : experts) {
        slot.expert->gate_up = std::move(slot.interleaved);
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
      if (slot.required && slot.values.empty()) {
        missing.push_back(name);
      }
    }
    AddMissingOfExperts(missing);
    const auto has_attention = [&](size_t i) { return config.HasAttention(static_cast<int>(i)); };
    bool has_sinks = false;
    for (size_t i = 0; i < weights->layers.size(); ++i) {
      has_sinks =
          has_sinks || (has_attention(i) && HasVector("layers." + std::to_string(i) + ".sinks"));
    }
    for (size_t i = 0; i < weights->layers.size(); ++i) {
      if (!has_attention(i)) {
        continue;
      }
      const std::string layer = "layers." + std::to_string(i);
      if (has_sinks && !HasVector(layer + ".sinks")) {
        missing.push_back(layer + ".sinks");
      }
      const bool has_q_norm = HasVector(layer + ".q_norm");
      if (has_q_norm && config.norm.qk_all_heads &&
          (HasVector(layer + ".q.bias") || HasVector(layer + ".k.bias"))) {
        throw InvalidArgument("Layer " + std::to_string(i) +
                              " has biases of q or k and norms over all heads. These norms "
                              "support no biases.");
      }
      if (config.OwnsKv(static_cast<int>(i)) && has_q_norm != HasVector(layer + ".k_norm")) {
        missing.push_back(layer + (has_q_norm ? ".k_norm" : ".q_norm"));
      }
    }
    if (missing.empty()) {
      return;
    }
    constexpr size_t kNamed = 8;
    std::string text = "The weights lack tensors (" + std::to_string(missing.size()) + "):";
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
  std::vector<std::pair<LinearWeight*, std::vector<std::string>>> linear_biases;
  std::deque<ExpertSlot> experts;  // a deque, because linear_biases points to its elements
};

WeightsBuilder::WeightsBuilder(const ModelConfig& config, Device& device, bool exact)
    : impl_(std::make_unique<Impl>(config, device, exact)) {}

WeightsBuilder::~WeightsBuilder() = default;

void WeightsBuilder::AddMatrix(std::string_view name, const MatrixSource& source) {
  const std::string key(name);
  impl_->RequireNotBuilt(", so they cannot take matrix " + key);
  const auto found = impl_->matrices.find(key);
  if (found == impl_->matrices.end()) {
    throw InvalidArgument("The weights have no matrix named " + key);
  }
  const MatrixSlot& slot = found->second;
  if (*slot.target != nullptr) {
    throw InvalidArgument("Weight matrix " + key + " was added twice.");
  }
  if (source.rows != slot.rows || source.cols != slot.cols) {
    throw InvalidArgument("Weight matrix " + key + " has shape " + Shape(source.rows, source.cols) +
                          ", but the config requires " + Shape(slot.rows, slot.cols));
  }
  *slot.target = impl_->device.PackMatrix(source, impl_->exact || slot.exact);
  if (source.owner != nullptr) {
    impl_->weights->in_place.push_back(source.data);
    if (source.scales != nullptr) {
      impl_->weights->in_place.push_back(source.scales);
    }
  }
}

void WeightsBuilder::AddVector(std::string_view name, const float* data, int64_t size) {
  const std::string key(name);
  impl_->RequireNotBuilt(", so they cannot take vector " + key);
  const auto found = impl_->vectors.find(key);
  if (found == impl_->vectors.end()) {
    throw InvalidArgument("The weights have no vector named " + key);
  }
  VectorSlot& slot = found->second;
  if (!slot.values.empty()) {
    throw InvalidArgument("Weight vector " + key + " was added twice.");
  }
  if (size != slot.size) {
    throw InvalidArgument("Weight vector " + key + " has " + std::to_string(size) +
                          " values, but the config requires " + std::to_string(slot.size));
  }
  slot.values.assign(data, data + size);
}

std::vector<std::pair<std::string, const PackedMatrix*>> WeightsBuilder::Matrices() const {
  impl_->RequireNotBuilt();
  std::vector<std::pair<std::string, const PackedMatrix*>> all;
  for (const auto& [name, slot] : impl_->matrices) {
    if (*slot.target != nullptr) {
      all.emplace_back(name, slot.target->get());
    }
  }
  return all;
}

std::shared_ptr<const Weights> WeightsBuilder::weights() const { return impl_->weights; }

std::shared_ptr<const Weights> WeightsBuilder::Build() {
  impl_->RequireNotBuilt();
  impl_->RequireOneForm();
  impl_->RequireComplete();
  impl_->RequireOneFormat();
  impl_->Upload();
  impl_->ChooseForm();
  impl_->ViewHeads();
  impl_->SetScales();
  impl_->weights->exact = impl_->exact;
  return std::exchange(impl_->weights, nullptr);
}

}  // namespace turbomind
