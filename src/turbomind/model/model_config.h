#pragma once

#include <cstdint>
#include <vector>

#include "turbomind/core/dtype.h"
#include "turbomind/model/latent_config.h"
#include "turbomind/model/layer_sizes.h"
#include "turbomind/model/recurrent_config.h"
#include "turbomind/ops/params.h"
#include "turbomind/ops/rope_config.h"

namespace turbomind {

// Experts that replace the feed-forward of some layers. Names match Hugging Face configs.
struct MoeConfig {
  int num_experts = 0;               // 0: a dense model
  int top_k = 0;                     // num_experts_per_tok
  int intermediate_size = 0;         // of one expert
  int shared_intermediate_size = 0;  // 0: no shared expert
  int latent_size = 0;               // inputs and outputs of routed experts; 0: hidden_size
  bool normalize = true;             // norm_topk_prob
  bool sigmoid = false;              // scores are sigmoids, not a softmax
  bool shared_gate = true;           // a router weighs the shared expert
  bool best_of_group = false;        // a group counts as its best expert, not as its best two
  bool weigh_inputs = false;         // weights multiply the inputs of experts, not their outputs
  // A layer with experts also has the dense feed-forward. Both have norms of their own, and so has
  // the router, whose weights get a factor per expert.
  bool beside_dense = false;
  int num_groups = 1;           // n_group: experts are chosen from the best groups
  int top_groups = 1;           // topk_group
  float scale = 1.f;            // routed_scaling_factor
  std::vector<uint8_t> layers;  // per layer; 1: experts, 0: dense feed-forward

  bool HasExperts(int layer) const {
    return num_experts > 0 && layers[static_cast<size_t>(layer)] != 0;
  }
};

// Where a layer normalizes.
struct NormConfig {
  bool centered = false;       // LayerNorm instead of RMSNorm
  bool inputs = true;          // attention_norm and ffn_norm, before each branch
  bool outputs = false;        // attention_output_norm and ffn_output_norm, before it is added
  bool qk_all_heads = false;   // q_norm and k_norm cover all heads together
  bool qk_after_rope = false;  // q_norm and k_norm follow RoPE
  bool qk_unit = false;        // weights of 1 replace q_norm and k_norm, in layers with RoPE
  bool v_unit = false;         // V has a norm by head, with weights of 1
};

// A decoder model as data. Optional parts (biases, q_norm and k_norm, sinks, separate head) are
// used if their weights exist. A branch is attention or the feed-forward.
struct ModelConfig {
  int num_layers = 0;
  int hidden_size = 0;
  int intermediate_size = 0;  // of the dense feed-forward; 0 if every layer has experts
  int num_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;  // values of K and of V; with latents, of the latent
  int vocab_size = 0;
  int max_position = 0;  // max_position_embeddings
  float norm_eps = 1e-6f;
  float softmax_scale = 0.f;  // 0 means 1 / sqrt(head_dim)
  float attention_cap = 0.f;  // soft cap of attention scores; 0: none
  float embedding_scale = 1.f;
  float residual_scale = 1.f;  // factor of each branch
  float logit_scale = 1.f;
  float logit_cap = 0.f;  // soft cap of the scaled logits; 0: none
  bool parallel = false;  // both branches read attention_norm; there is no ffn_norm
  bool gated = true;      // the dense feed-forward has a gate
  bool attention_gate =
      false;  // attention is multiplied by the sigmoid of a projection of its input
  NormConfig norm;
  Activation activation = Activation::kSilu;
  float swiglu_limit = 7.f;  // for kClampedSwiglu
  MoeConfig moe;
  RecurrentConfig recurrent;
  LatentConfig latent;
  // Per layer: 1 if it has the branch. Empty: every layer that is not recurrent has attention, and
  // every layer a feed-forward.
  std::vector<uint8_t> attention_layers;
  std::vector<uint8_t> feed_forward_layers;
  std::vector<RopeConfig> ropes = {{}};
  std::vector<int> layer_ropes;  // per layer: index in ropes, or -1; empty: 0 for all
  // The temperature of Q, in every layer or only in layers without RoPE.
  QueryScaling query_scaling;
  bool query_scaling_without_rope = false;
  bool k_bias = false;       // K has a bias, which RoPE follows without a norm between them
  std::vector<int> windows;  // per layer, as in kv/sliding_window.h
  LayerSizes layer_sizes;
  PerLayerInputs per_layer;
  bool layer_scale = false;              // a factor of every layer multiplies its output
  DataType dtype = DataType::kBFloat16;  // cache dtype (16-bit values and inline metadata)

  // Throws InvalidArgument that names the field.
  void Validate() const;
  bool HasAttention(int layer) const;
  bool HasFeedForward(int layer) const;
  // Returns whether a layer has a branch that mixes tokens: attention, or a recurrent state, or
  // the sum of both.
  bool HasMixer(int layer) const { return HasAttention(layer) || recurrent.Has(layer); }
  int NumAttentionLayers() const;
  // Returns the values of all query heads, and those of attention's output.
  int64_t QuerySize() const {
    return int64_t{num_heads} * (latent.exists() ? latent.QueryDim() : head_dim);
  }
  int64_t AttendedSize() const {
    return int64_t{num_heads} * (latent.exists() ? latent.value_dim : head_dim);
  }
  // Return the sizes of a layer.
  int HeadDim(int layer) const;
  int KvHeads(int layer) const;
  int IntermediateSize(int layer) const;
  // Return the values of all query heads of a layer, and of its K or V.
  int64_t QSize(int layer) const { return int64_t{num_heads} * HeadDim(layer); }
  int64_t KvSize(int layer) const { return int64_t{KvHeads(layer)} * HeadDim(layer); }
  // Returns the values of a layer's projected Q, K and V. A layer without K and V has only Q.
  int64_t QkvSize(int layer) const {
    return QSize(layer) + (OwnsKv(layer) ? 2 * KvSize(layer) : 0);
  }
  // Returns the layer whose K and V a layer with attention reads.
  int KvSource(int layer) const;
  // Returns whether a layer computes and stores K and V.
  bool OwnsKv(int layer) const { return HasAttention(layer) && KvSource(layer) == layer; }
  bool SharesKv() const;
  // Returns whether all layers have the same head_dim and number of KV heads.
  bool HasOneKvShape() const;
  // Returns whether some layer has attention and a recurrent state.
  bool HasSumOfMixers() const;
  bool HasDenseFeedForward(int layer) const {
    return HasFeedForward(layer) && (!moe.HasExperts(layer) || moe.beside_dense);
  }
  // Returns whether some layer has a feed-forward of intermediate_size.
  bool HasDenseLayer() const;
  // Returns the index of a layer's RoPE in ropes, or -1 if the layer has none.
  int RopeOf(int layer) const;
  // Returns the temperature of a layer's Q.
  QueryScaling QueryScalingOf(int layer) const;
  // Returns whether the output of a branch is changed before it is added to the residual.
  bool ChangesBranches() const { return norm.outputs || residual_scale != 1.f; }
};

// Returns a valid model with its RoPE resolved for this session_len (ResolveRope). A model with a
// bias of K has one set of frequencies, even with `by_sequence`. Throws InvalidArgument.
ModelConfig Resolved(ModelConfig model, int session_len, bool by_sequence = true);

// Returns the greatest length of a sequence that uses set 0 of the frequencies (RopeTable), given a
// model and the engine's session_len. 0: all sequences use that set. Throws InvalidArgument.
int ShortRopeLength(const ModelConfig& model, int session_len);

}  // namespace turbomind
