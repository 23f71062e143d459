#include "turbomind/model/model_config.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "turbomind/core/check.h"
#include "turbomind/ops/kv_checks.h"
#include "turbomind/ops/rope.h"

namespace turbomind {
namespace {

// Above any real model. These limits keep products of two sizes within 64 bits.
constexpr int64_t kMaxLayers = 4096;
constexpr int64_t kMaxHeads = 65536;
constexpr int kMaxHeadSize = 1024;
constexpr int64_t kMaxWidth = int64_t{1} << 24;
constexpr int64_t kMaxPosition = int64_t{1} << 30;
// The memory for the weights' names grows with the number of experts in all layers.
constexpr int64_t kMaxExperts = 1024;
constexpr int64_t kMaxExpertsOfModel = 65536;

void RequireSize(const char* field, int64_t got, int64_t limit) {
  if (got < 1 || got > limit) {
    throw InvalidArgument(
        field, "is " + std::to_string(got) + ". It must be 1 to " + std::to_string(limit));
  }
}

void Require(bool ok, const std::string& field, const std::string& reason) {
  if (!ok) {
    throw InvalidArgument(field, reason);
  }
}

void ValidateGroups(const MoeConfig& moe) {
  RequireSize("moe.num_groups", moe.num_groups, kMaxExpertGroups);
  RequireSize("moe.top_groups", moe.top_groups, moe.num_groups);
  const int size = moe.num_experts / moe.num_groups;
  Require(moe.num_groups == 1 || (moe.num_experts % moe.num_groups == 0 && size >= 2),
          "moe.num_groups",
          "is " + std::to_string(moe.num_groups) + ". It must divide the " +
              std::to_string(moe.num_experts) + " experts into groups of at least 2.");
  Require(moe.num_groups == 1 || moe.top_groups * size >= moe.top_k, "moe.top_groups",
          "is " + std::to_string(moe.top_groups) +
              ". The selected groups have fewer experts than moe.top_k (" +
              std::to_string(moe.top_k) + ").");
}

void ValidateMoe(const MoeConfig& moe, int num_layers) {
  const auto with_experts = std::ranges::count(moe.layers, uint8_t{1});
  if (moe.num_experts == 0) {
    Require(with_experts == 0, "moe.layers",
            "has layers with experts, but moe.num_experts is 0. Set moe.num_experts.");
    return;
  }
  RequireSize("moe.num_experts", moe.num_experts, kMaxExperts);
  RequireSize("moe.top_k", moe.top_k, moe.num_experts);
  ValidateGroups(moe);
  RequireSize("moe.intermediate_size", moe.intermediate_size, kMaxWidth);
  const int shared = moe.shared_intermediate_size;
  Require(shared >= 0 && shared <= kMaxWidth, "moe.shared_intermediate_size",
          "is " + std::to_string(shared) + ". It must be 0 to " + std::to_string(kMaxWidth));
  Require(
      moe.latent_size >= 0 && moe.latent_size <= kMaxWidth, "moe.latent_size",
      "is " + std::to_string(moe.latent_size) + ". It must be 0 to " + std::to_string(kMaxWidth));
  Require(moe.layers.size() == static_cast<size_t>(num_layers), "moe.layers",
          "has " + std::to_string(moe.layers.size()) + " entries. It must have one per layer (" +
              std::to_string(num_layers) + ")");
  for (const uint8_t layer : moe.layers) {
    Require(layer <= 1, "moe.layers",
            "contains " + std::to_string(layer) +
                ". Each entry must be 1 (experts) or 0 (dense feed-forward).");
  }
  const int64_t experts = with_experts * moe.num_experts;
  Require(experts <= kMaxExpertsOfModel, "moe.num_experts",
          "gives " + std::to_string(experts) + " experts in all layers. Use at most " +
              std::to_string(kMaxExpertsOfModel));
}

}  // namespace

bool ModelConfig::HasAttention(int layer) const {
  return attention_layers.empty() ? !recurrent.Has(layer)
                                  : attention_layers[static_cast<size_t>(layer)] != 0;
}

bool ModelConfig::HasFeedForward(int layer) const {
  return feed_forward_layers.empty() || feed_forward_layers[static_cast<size_t>(layer)] != 0;
}

int ModelConfig::NumAttentionLayers() const {
  int count = 0;
  for (int layer = 0; layer < num_layers; ++layer) {
    count += HasAttention(layer) ? 1 : 0;
  }
  return count;
}

bool ModelConfig::HasSumOfMixers() const {
  for (int layer = 0; layer < num_layers; ++layer) {
    if (HasAttention(layer) && recurrent.Has(layer)) {
      return true;
    }
  }
  return false;
}

bool ModelConfig::HasDenseLayer() const {
  for (int layer = 0; layer < num_layers; ++layer) {
    if (HasDenseFeedForward(layer)) {
      return true;
    }
  }
  return false;
}

int ModelConfig::HeadDim(int layer) const {
  const std::vector<int>& dims = layer_sizes.head_dims;
  return dims.empty() ? head_dim : dims[static_cast<size_t>(layer)];
}

int ModelConfig::KvHeads(int layer) const {
  const std::vector<int>& heads = layer_sizes.kv_heads;
  return heads.empty() ? num_kv_heads : heads[static_cast<size_t>(layer)];
}

int ModelConfig::IntermediateSize(int layer) const {
  const std::vector<int>& sizes = layer_sizes.intermediate_sizes;
  return sizes.empty() ? intermediate_size : sizes[static_cast<size_t>(layer)];
}

int ModelConfig::KvSource(int layer) const {
  const std::vector<int>& sources = layer_sizes.kv_sources;
  return sources.empty() ? layer : sources[static_cast<size_t>(layer)];
}

bool ModelConfig::SharesKv() const {
  for (int layer = 0; layer < num_layers; ++layer) {
    if (HasAttention(layer) && !OwnsKv(layer)) {
      return true;
    }
  }
  return false;
}

bool ModelConfig::HasOneKvShape() const {
  for (int layer = 0; layer < num_layers; ++layer) {
    if (HasAttention(layer) && (HeadDim(layer) != head_dim || KvHeads(layer) != num_kv_heads)) {
      return false;
    }
  }
  return true;
}

int ModelConfig::RopeOf(int layer) const {
  const int index = layer_ropes.empty() ? 0 : layer_ropes[static_cast<size_t>(layer)];
  return index >= 0 && ropes[static_cast<size_t>(index)].kind != RopeKind::kNone ? index : -1;
}

QueryScaling ModelConfig::QueryScalingOf(int layer) const {
  return query_scaling_without_rope && RopeOf(layer) >= 0 ? QueryScaling{} : query_scaling;
}

namespace {

void RequireFactor(const char* field, float got, bool may_be_zero) {
  Require(std::isfinite(got) && (got > 0.f || (may_be_zero && got == 0.f)), field,
          "is " + std::to_string(got) + ". It must be positive" +
              (may_be_zero ? ", or 0 for none." : "."));
}

void ValidateFactors(const ModelConfig& model) {
  RequireFactor("attention_cap", model.attention_cap, true);
  RequireFactor("embedding_scale", model.embedding_scale, false);
  RequireFactor("residual_scale", model.residual_scale, false);
  RequireFactor("logit_scale", model.logit_scale, false);
  RequireFactor("logit_cap", model.logit_cap, true);
  RequireFactor("moe.scale", model.moe.scale, false);
  RequireFactor("query_scaling.beta", model.query_scaling.beta, true);
  RequireSize("query_scaling.length", model.query_scaling.length, kMaxPosition);
  Require(model.query_scaling.offset >= 0 && model.query_scaling.offset <= kMaxPosition,
          "query_scaling.offset",
          "is " + std::to_string(model.query_scaling.offset) + ". It must be 0 to " +
              std::to_string(kMaxPosition) + ".");
}

void ValidateStructure(const ModelConfig& model) {
  const NormConfig& norm = model.norm;
  Require(norm.inputs || norm.outputs, "norm.inputs",
          "and norm.outputs are false. At least one must be true.");
  Require(!model.parallel || norm.inputs, "parallel",
          "is true and norm.inputs is false. A parallel layer needs norm.inputs.");
  Require(model.gated || model.activation != Activation::kClampedSwiglu, "gated",
          "is false. It must be true with the activation clamped_swiglu.");
  Require(!norm.qk_unit || !norm.qk_all_heads, "norm.qk_unit",
          "and norm.qk_all_heads are true. At most one may be true.");
}

void ValidateBranches(const ModelConfig& model) {
  for (const auto& [field, layers] :
       {std::pair{"attention_layers", &model.attention_layers},
        std::pair{"feed_forward_layers", &model.feed_forward_layers}}) {
    Require(layers->empty() || layers->size() == static_cast<size_t>(model.num_layers), field,
            "has " + std::to_string(layers->size()) + " entries. It must have one per layer (" +
                std::to_string(model.num_layers) + ").");
    Require(std::ranges::all_of(*layers, [](uint8_t has) { return has <= 1; }), field,
            "must contain 0 and 1 only.");
  }
  Require(model.NumAttentionLayers() > 0, "attention_layers",
          "leaves no layer with attention. The model must have at least one.");
  for (int layer = 0; layer < model.num_layers; ++layer) {
    Require(model.HasMixer(layer) || model.HasFeedForward(layer), "feed_forward_layers",
            "leaves layer " + std::to_string(layer) + " without a branch.");
    Require(!model.parallel || (model.HasMixer(layer) && model.HasFeedForward(layer)), "parallel",
            "is true, but layer " + std::to_string(layer) + " has one branch. It must have two.");
    Require(model.HasFeedForward(layer) || !model.moe.HasExperts(layer), "moe.layers",
            "has experts in layer " + std::to_string(layer) + ", which has no feed-forward.");
  }
}

void ValidateRopes(const ModelConfig& model) {
  constexpr size_t kMaxRopes = 16;
  Require(!model.ropes.empty() && model.ropes.size() <= kMaxRopes, "ropes",
          "has " + std::to_string(model.ropes.size()) + " entries. It must have 1 to " +
              std::to_string(kMaxRopes));
  for (const RopeConfig& rope : model.ropes) {
    const RopeTable checked(rope);
    Require(rope.kind == RopeKind::kNone || rope.dim <= kMaxHeadSize, "rope.dim",
            "is " + std::to_string(rope.dim) + ". It must be at most " +
                std::to_string(kMaxHeadSize) + ".");
  }
  const auto layers = static_cast<size_t>(model.num_layers);
  Require(model.layer_ropes.empty() || model.layer_ropes.size() == layers, "layer_ropes",
          "has " + std::to_string(model.layer_ropes.size()) +
              " entries. It must have one per layer (" + std::to_string(layers) + ")");
  for (const int index : model.layer_ropes) {
    Require(index >= -1 && index < static_cast<int>(model.ropes.size()), "layer_ropes",
            "contains " + std::to_string(index) +
                ". Each entry must be an index in ropes, or -1 for none.");
  }
  for (int layer = 0; layer < model.num_layers; ++layer) {
    const int rope = model.HasAttention(layer) ? model.RopeOf(layer) : -1;
    const int dim = rope < 0 ? 0 : model.ropes[static_cast<size_t>(rope)].dim;
    Require(dim <= model.HeadDim(layer), "rope.dim",
            "is " + std::to_string(dim) + ". It must be at most the head_dim of layer " +
                std::to_string(layer) + " (" + std::to_string(model.HeadDim(layer)) + ").");
  }
}

// Requires one entry of [1, limit] per layer, or none.
void ValidateSizes(const char* field, const std::vector<int>& sizes, int num_layers,
                   int64_t limit) {
  Require(sizes.empty() || sizes.size() == static_cast<size_t>(num_layers), field,
          "has " + std::to_string(sizes.size()) + " entries. It must have one per layer (" +
              std::to_string(num_layers) + ").");
  for (const int size : sizes) {
    RequireSize(field, size, limit);
  }
}

// Checks the layers whose K and V a layer reads.
void ValidateKvSources(const ModelConfig& model) {
  const std::vector<int>& sources = model.layer_sizes.kv_sources;
  const char* const field = "layer_sizes.kv_sources";
  Require(sources.empty() || sources.size() == static_cast<size_t>(model.num_layers), field,
          "has " + std::to_string(sources.size()) + " entries. It must have one per layer (" +
              std::to_string(model.num_layers) + ").");
  for (int layer = 0; layer < model.num_layers; ++layer) {
    const int source = model.KvSource(layer);
    if (source == layer) {
      continue;
    }
    const std::string named = "of layer " + std::to_string(layer) + " is " + std::to_string(source);
    Require(source >= 0 && source < layer, field, named + ". It must be an earlier layer.");
    Require(model.HasAttention(layer) && model.OwnsKv(source), field,
            named + ". Both layers must have attention, and that layer K and V of its own.");
    const auto at = static_cast<size_t>(layer);
    const auto from = static_cast<size_t>(source);
    Require(model.HeadDim(layer) == model.HeadDim(source) &&
                model.KvHeads(layer) == model.KvHeads(source) &&
                model.windows[at] == model.windows[from],
            field, named + ". Both layers must have the same window and the same KV heads.");
    Require(!model.k_bias && !model.norm.qk_all_heads, field,
            named + ". Such layers support no bias of K and no norms over all heads.");
  }
}

void ValidateLayerSizes(const ModelConfig& model) {
  const LayerSizes& sizes = model.layer_sizes;
  ValidateSizes("layer_sizes.head_dims", sizes.head_dims, model.num_layers, kMaxHeadSize);
  ValidateSizes("layer_sizes.kv_heads", sizes.kv_heads, model.num_layers, kMaxHeads);
  ValidateSizes("layer_sizes.intermediate_sizes", sizes.intermediate_sizes, model.num_layers,
                kMaxWidth);
  for (const int heads : sizes.kv_heads) {
    Require(model.num_heads % heads == 0, "layer_sizes.kv_heads",
            "contains " + std::to_string(heads) + ". Each entry must divide num_heads (" +
                std::to_string(model.num_heads) + ").");
  }
  Require(!model.k_bias || model.HasOneKvShape(), "k_bias",
          "is true. It must be false if layers differ in head_dim or KV heads.");
  Require(model.per_layer.size >= 0 && model.per_layer.size <= kMaxWidth / model.num_layers,
          "per_layer.size",
          "is " + std::to_string(model.per_layer.size) + ". It must be 0 to " +
              std::to_string(kMaxWidth / model.num_layers) + ".");
  Require(!model.moe.beside_dense ||
              (model.norm.inputs && model.norm.outputs && !model.parallel && model.gated),
          "moe.beside_dense", "must be false unless both branches have norms before and after.");
  Require(!model.per_layer.exist() || model.norm.outputs, "per_layer.size",
          "must be 0 if norm.outputs is false.");
}

// Checks that the latents fit the kernels, and that the model has no option that they lack.
void ValidateLatents(const ModelConfig& model) {
  constexpr int kMultiple = 16;
  const LatentConfig& latent = model.latent;
  if (latent.rope_dim == 0) {
    Require(latent.q_rank == 0 && latent.nope_dim == 0 && latent.value_dim == 0, "latent.rope_dim",
            "is 0, but other values of latent are not.");
    return;
  }
  for (const auto& [field, dim] :
       {std::pair{"latent.nope_dim", latent.nope_dim},
        std::pair{"latent.rope_dim", latent.rope_dim},
        std::pair{"latent.value_dim", latent.value_dim}, std::pair{"head_dim", model.head_dim}}) {
    Require(dim > 0 && dim <= kMaxLatentDim && dim % kMultiple == 0, field,
            "is " + std::to_string(dim) + ". With latents it must be a multiple of " +
                std::to_string(kMultiple) + " up to " + std::to_string(kMaxLatentDim) + ".");
  }
  Require(latent.rope_dim <= kMaxRotaryDim, "latent.rope_dim",
          "is " + std::to_string(latent.rope_dim) + ". It must be at most " +
              std::to_string(kMaxRotaryDim) + ".");
  Require(latent.q_rank >= 0 && latent.q_rank <= kMaxWidth, "latent.q_rank",
          "is " + std::to_string(latent.q_rank) + ". It must be 0 to " + std::to_string(kMaxWidth) +
              ".");
  Require(std::isfinite(latent.norm_eps) && latent.norm_eps >= 0.f, "latent.norm_eps",
          "is " + std::to_string(latent.norm_eps) + ". It must be finite and at least 0.");
  Require(model.num_kv_heads == 1, "num_kv_heads", "must be 1 with latents.");
  // Each head has matrices of its own, as experts have.
  const int64_t heads = int64_t{model.num_heads} * model.num_layers;
  Require(heads <= kMaxExpertsOfModel, "num_heads",
          "gives " + std::to_string(heads) + " heads in all layers. Use at most " +
              std::to_string(kMaxExpertsOfModel) + " with latents.");
  Require(model.softmax_scale > 0.f, "softmax_scale", "must be set with latents.");
  const bool is_plain = !model.recurrent.HasAny() && !model.attention_gate && !model.k_bias &&
                        model.attention_cap == 0.f && model.query_scaling.beta == 0.f &&
                        !model.norm.qk_all_heads && !model.norm.qk_unit;
  Require(is_plain, "latent.rope_dim",
          "is set, but attention over latents has no recurrent layers, gate, bias of K, cap, "
          "temperature or norms of heads.");
  for (int layer = 0; layer < model.num_layers; ++layer) {
    const int rope = model.RopeOf(layer);
    Require(rope >= 0 && model.ropes[static_cast<size_t>(rope)].dim == latent.rope_dim, "ropes",
            "must rotate latent.rope_dim (" + std::to_string(latent.rope_dim) +
                ") values in every layer.");
    Require(model.windows[static_cast<size_t>(layer)] == 0, "windows",
            "must be 0 in every layer with latents.");
  }
}

}  // namespace

void ModelConfig::Validate() const {
  RequireSize("num_layers", num_layers, kMaxLayers);
  RequireSize("hidden_size", hidden_size, kMaxWidth);
  RequireSize("num_heads", num_heads, kMaxHeads);
  RequireSize("num_kv_heads", num_kv_heads, kMaxHeads);
  RequireSize("head_dim", head_dim, kMaxHeadSize);
  RequireSize("vocab_size", vocab_size, kMaxWidth);
  RequireSize("max_position", max_position, kMaxPosition);
  Require(num_heads % num_kv_heads == 0, "num_heads",
          "is " + std::to_string(num_heads) + ". It must be a multiple of num_kv_heads (" +
              std::to_string(num_kv_heads) + ")");
  Require(std::isfinite(norm_eps) && norm_eps >= 0.f, "norm_eps",
          "is " + std::to_string(norm_eps) + ". It must be finite and at least 0.");
  Require(std::isfinite(softmax_scale) && softmax_scale >= 0.f, "softmax_scale",
          "is " + std::to_string(softmax_scale) +
              ". It must be positive, or 0 for 1 / sqrt(head_dim).");
  Require(windows.size() == static_cast<size_t>(num_layers), "windows",
          "has " + std::to_string(windows.size()) + " entries. It must have one per layer (" +
              std::to_string(num_layers) + ")");
  for (int window : windows) {
    Require(window >= -kMaxPosition, "windows",
            "contains " + std::to_string(window) +
                ". Each entry must be a number of tokens, 0 for full attention, or the negative "
                "number of tokens of a chunk, at least -" +
                std::to_string(kMaxPosition) + ".");
  }
  ValidateMoe(moe, num_layers);
  Require(activation != Activation::kClampedSwiglu ||
              (std::isfinite(swiglu_limit) && swiglu_limit > 0.f),
          "swiglu_limit", "is " + std::to_string(swiglu_limit) + ". It must be positive.");
  recurrent.Validate(num_layers);
  ValidateBranches(*this);
  if (HasDenseLayer()) {
    RequireSize("intermediate_size", intermediate_size, kMaxWidth);
  }
  ValidateFactors(*this);
  ValidateStructure(*this);
  ValidateLayerSizes(*this);
  ValidateKvSources(*this);
  ValidateRopes(*this);
  ValidateLatents(*this);
}

ModelConfig Resolved(ModelConfig model, int session_len, bool by_sequence) {
  model.Validate();
  for (RopeConfig& rope : model.ropes) {
    rope = ResolveRope(std::move(rope), session_len, by_sequence && !model.k_bias);
  }
  return model;
}

int ShortRopeLength(const ModelConfig& model, int session_len) {
  int length = 0;
  for (const RopeConfig& rope : Resolved(model, session_len).ropes) {
    if (!rope.long_factors.empty()) {
      length =
          length == 0 ? rope.original_max_position : std::min(length, rope.original_max_position);
    }
  }
  return length;
}

}  // namespace turbomind
