#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "turbomind/core/device_array.h"
#include "turbomind/model/model_config.h"
#include "turbomind/ops/device.h"

namespace turbomind {

// A part of Weights::vectors.
struct VectorWeight {
  const float* data = nullptr;  // device memory; null if empty
  int64_t size = 0;

  bool empty() const { return size == 0; }
};

// A linear layer: one or more matrices stacked along their outputs (q, k and v; gate and up), each
// in its own format.
struct LinearWeight {
  std::vector<std::unique_ptr<PackedMatrix>> parts;
  VectorWeight bias;  // [sum of rows] or empty
  // Its projection computes the norm of its input on the way (ProjectParams), and the activation of
  // its outputs.
  bool is_normed = false;
  bool is_gated = false;

  bool empty() const { return parts.empty(); }
  int64_t rows() const;
  int64_t cols() const;
};

// One expert. gate_up has two parts (gate, up), or one part whose rows alternate between them.
struct ExpertWeights {
  LinearWeight gate_up;  // [2 * intermediate, hidden or latent]
  LinearWeight down;     // [hidden or latent, intermediate]

  bool interleaved() const { return gate_up.parts.size() == 1; }
};

// The weight of a norm, and its bias or empty.
struct NormWeight {
  VectorWeight weight;
  VectorWeight bias;
};

struct MoeWeights {
  LinearWeight router;                 // [num_experts, hidden], FP32
  VectorWeight score_bias;             // [num_experts], added to scores to select experts; or empty
  std::vector<ExpertWeights> experts;  // [num_experts]; empty for a dense layer
  LinearWeight latent_down, latent_up;  // [latent, hidden], [hidden, latent]; may be empty
  LinearWeight shared_gate_up, shared_down;
  LinearWeight shared_router;  // [1, hidden], FP32; empty if nothing weighs the shared expert
  // For MoeConfig::beside_dense:
  VectorWeight expert_scale;     // [num_experts]
  NormWeight router_norm, norm;  // [hidden], of the inputs of the router and of the experts
  NormWeight output_norm;        // [hidden], of the experts
  NormWeight dense_output_norm;  // [hidden]
};

// The layer of a RecurrentConfig. Its rule says which parts `input` has, in this order:
// kGatedDelta: q, k, v, z, b, a; kSelectiveScan: v, k, q, z, a; kShortConvolution: v, in_gate,
// out_gate. Those before z are the channels of the convolution.
struct RecurrentWeights {
  LinearWeight input;             // [InputSize, hidden]
  VectorWeight convolution;       // [kernel, channels]
  VectorWeight convolution_bias;  // [channels] or empty
  VectorWeight decay;             // [value_heads]
  VectorWeight dt_bias;           // [value_heads]
  VectorWeight skip;              // [value_heads]; of kSelectiveScan
  VectorWeight norm;              // [value_size]; empty if there is no norm
  LinearWeight output;            // [hidden, value_size]
};

// The weights of attention over latents. The matrices of heads have one part per head, in the form
// that multiplies latents: a query is absorbed by k_b, and sums of latents become values by v_b.
struct LatentWeights {
  LinearWeight q_down;                  // [q_rank, hidden]; empty if q_rank is 0
  VectorWeight q_norm;                  // [q_rank]
  LinearWeight q;                       // [heads * QueryDim, q_rank or hidden]
  LinearWeight down;                    // [rank + rope_dim, hidden]
  VectorWeight norm;                    // [rank]
  std::vector<LinearPart> k_up, v_up;   // [heads]: views of the parts of the following
  LinearWeight k_matrices, v_matrices;  // [heads * rank, nope_dim], [heads * value_dim, rank]
};

struct LayerWeights {
  NormWeight attention_norm, attention_output_norm;  // [hidden]; empty if the model has none
  NormWeight ffn_norm, ffn_output_norm;              // same
  VectorWeight q_norm, k_norm;  // [head_dim], or all heads' [heads * head_dim]; may be empty
  VectorWeight v_norm;          // [head_dim] or empty
  VectorWeight sinks;           // [num_heads] or empty
  LinearWeight qkv;             // [QkvSize, hidden]: q, k and v, or q for a layer without K and V
  LinearWeight attention_gate;  // [heads * head_dim, hidden] or empty
  LinearWeight output;          // [hidden, ModelConfig::AttendedSize]
  LatentWeights latent;         // instead of qkv, if the model has latents
  RecurrentWeights recurrent;   // of a recurrent layer
  LinearWeight gate_up;         // [2 * intermediate, hidden], for a dense layer; only up if the
                                // model's feed-forward has no gate
  LinearWeight down;            // [hidden, intermediate], for a dense layer
  MoeWeights moe;
  LinearWeight per_layer_gate;       // [PerLayerInputs::size, hidden], if the model has them
  LinearWeight per_layer_up;         // [hidden, PerLayerInputs::size]
  NormWeight per_layer_output_norm;  // [hidden]
  float scale = 1.f;                 // ModelConfig::layer_scale

  // Returns every linear layer, including empty ones: those that every token uses, and all.
  std::vector<const LinearWeight*> shared_linears() const;
  std::vector<const LinearWeight*> linears() const;
};

struct Weights {
  std::unique_ptr<PackedMatrix> embedding;  // [vocab, hidden]
  std::vector<LayerWeights> layers;
  std::vector<int> head_dims;  // of the layers that read a cache of K and V, each once
  NormWeight final_norm;       // [hidden]
  // For models with per-layer inputs:
  std::unique_ptr<PackedMatrix> per_layer_embedding;  // [vocab, layers * PerLayerInputs::size]
  LinearWeight per_layer_projection;                  // [layers * PerLayerInputs::size, hidden]
  VectorWeight per_layer_norm;                        // [PerLayerInputs::size]
  std::unique_ptr<PackedMatrix> head;  // [vocab, hidden]; null if tied to the embedding
  bool exact = false;                  // attention is also computed in FP32
  DeviceArray vectors;                 // storage of every VectorWeight
  std::vector<const void*> in_place;   // matrices that are read in the mapped file

  const PackedMatrix& output_head() const { return head ? *head : *embedding; }
  int64_t num_bytes() const;
};

// Fills Weights by name, each name once:
//   embedding, final_norm, head,
//   layers.{i}.{attention_norm, attention_output_norm, ffn_norm, ffn_output_norm, q_norm, k_norm,
//   sinks}; the norms over hidden values may have a ".bias", as final_norm may,
//   layers.{i}.{q, k, v, o, gate, up, down} and the same with ".bias",
//   layers.{i}.attention_gate if the model has it; k, k_norm and v only for a layer with K and V;
// for a layer with latents, instead of q, k and v, where {h} is a head:
//   layers.{i}.latent.{q_a, q_a_norm, q, kv_a, kv_a_norm} and the same with ".bias",
//   layers.{i}.latent.k_b.{h} [rank, nope_dim], layers.{i}.latent.v_b.{h} [value_dim, rank];
// for a model with per-layer inputs:
//   per_layer_embedding, per_layer_projection, per_layer_norm,
//   layers.{i}.{per_layer_gate, per_layer_up, per_layer_output_norm},
// and layers.{i}.scale, one value, if the model has a factor of every layer;
// for a recurrent layer:
//   layers.{i}.recurrent.{o, convolution, convolution.bias}, and by its rule (RecurrentWeights)
//   layers.{i}.recurrent.{q, k, v, z, b, a, in_gate, out_gate, decay, dt_bias, skip, norm};
// and for a layer with experts, instead of gate, up and down:
//   layers.{i}.router, layers.{i}.router.score_bias,
//   layers.{i}.experts.{e}.{gate, up, down} and the same with ".bias"; gate_up, with the rows
//   gate0, up0, gate1, ..., may replace gate and up,
//   layers.{i}.latent_{down, up} if the routed experts have a latent size,
//   layers.{i}.shared.{gate, up, down, router} if the model has a shared expert,
// and for experts beside a dense feed-forward also gate, up and down, and
//   layers.{i}.router.{norm, expert_scale},
//   layers.{i}.{expert_norm, expert_output_norm, dense_output_norm}.
// Routers are packed exactly: they are small, and a rounded logit would select other experts.
class WeightsBuilder {
 public:
  WeightsBuilder(const ModelConfig& config, Device& device, bool exact);
  ~WeightsBuilder();

  // Copy and pack one tensor. Throw InvalidArgument for an unknown or repeated name, and for a
  // shape that does not match the config (naming both).
  void AddMatrix(std::string_view name, const MatrixSource& source);
  void AddVector(std::string_view name, const float* data, int64_t size);

  // Returns the matrices added so far, by name, in no particular order. They and the pointed-to
  // data live as long as the weights of Build(). Throws InvalidArgument after Build().
  std::vector<std::pair<std::string, const PackedMatrix*>> Matrices() const;

  // Returns the weights that Build() will return. They own the matrices.
  std::shared_ptr<const Weights> weights() const;

  // Completes the weights. Throws InvalidArgument that lists missing tensors.
  std::shared_ptr<const Weights> Build();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace turbomind
