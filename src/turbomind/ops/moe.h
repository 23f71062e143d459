#pragma once

// ⑥⑦ Mixture of experts. A router selects a few experts for each token. Their weighted outputs are
// added to the residual, and so is the output of a shared expert if there is one.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "turbomind/ops/device.h"

namespace turbomind {

// One matrix and its bias.
using MatrixView = LinearPart;

// Views of the weights of one layer's experts. The weights must outlive it.
struct MoeLayer {
  int hidden_size = 0;
  int num_experts = 0;
  int top_k = 0;
  int intermediate_size = 0;         // of one expert
  int shared_intermediate_size = 0;  // 0: no shared expert
  int latent_size = 0;               // inputs and outputs of the routed experts; 0: hidden_size
  bool normalize = false;            // normalize a token's weights to a sum of 1
  bool sigmoid = false;              // scores are sigmoids, not a softmax
  bool weigh_inputs = false;         // weights multiply the inputs of experts, not their outputs
  int num_groups = 1;                // of adjacent experts: RouteExpertsParams::num_groups
  int top_groups = 1;
  bool best_of_group = false;  // RouteExpertsParams::best_of_group
  float scale = 1.f;           // factor of the routed experts' output
  Activation activation = Activation::kSilu;
  float swiglu_limit = 0.f;

  MatrixView router = {};               // [num_experts, hidden]
  const float* score_bias = nullptr;    // [num_experts] or null: RouteExpertsParams::bias
  const float* expert_scale = nullptr;  // [num_experts] or null: RouteExpertsParams::expert_scale
  // Each [num_experts]: either gate and up, or gate_up, whose rows alternate between them. Without
  // both gate and gate_up, experts compute down(activation(up(x))), the shared one, too.
  std::vector<MatrixView> gate = {}, up = {};
  std::vector<MatrixView> gate_up = {};  // [2 * intermediate, expert_size]
  std::vector<MatrixView> down = {};     // [num_experts] of [expert_size, intermediate]
  // [latent, hidden] and [hidden, latent], around the routed experts if they have a latent size.
  MatrixView latent_down = {}, latent_up = {};

  MatrixView shared_gate = {}, shared_up = {}, shared_down = {};  // shared_gate: if gated()
  // [1, hidden]: its sigmoid is the weight of the shared expert. Without it, the weight is 1.
  MatrixView shared_router = {};

  bool empty() const { return num_experts == 0; }
  int expert_size() const { return latent_size > 0 ? latent_size : hidden_size; }
  bool interleaved() const { return !gate_up.empty(); }
  bool gated() const { return interleaved() || !gate.empty(); }
  // Returns how many values of scratch.gate_up a value of `activated` is computed from.
  int num_inputs() const { return gated() ? 2 : 1; }
};

// Scratch memory of the op. gate_up_width is a width per token: 2 · intermediate for each of top_k
// experts, or for the shared expert if that is larger.
struct MoeScratch {
  int max_tokens = 0;
  float* logits = nullptr;        // [max_tokens, num_experts]
  float* weights = nullptr;       // [max_tokens, top_k]
  int32_t* ids = nullptr;         // [max_tokens, top_k]
  int32_t* slots = nullptr;       // [max_tokens, top_k]
  int32_t* x_rows = nullptr;      // [max_tokens * top_k]
  float* slot_weights = nullptr;  // same; null unless the layer weighs inputs
  int32_t* offsets = nullptr;     // [num_experts + 1]
  float* gate_up = nullptr;       // [max_tokens, gate_up_width]
  float* activated = nullptr;     // [max_tokens, gate_up_width / 2]
  float* output = nullptr;        // [max_tokens, top_k * expert_size], or hidden if that is larger
  float* latent = nullptr;        // [max_tokens, latent]; null without a latent size
};

struct MoeParams {
  const MoeLayer* layer = nullptr;
  NormParams norm = {};             // computes x first; `x` is null if there is none
  const float* x = nullptr;         // [num_tokens, hidden]; with a norm, norm.out
  const float* router_x = nullptr;  // [num_tokens, hidden], what the router reads; null: x
  float* out = nullptr;             // [num_tokens, hidden]
  int num_tokens = 0;               // at most scratch.max_tokens
  bool accumulate = true;           // add to out
  MoeScratch scratch;
};

// Adds experts(x) to out, or writes it. Tokens are grouped by expert: each selected expert is read
// once, the others are not read. A row of out depends only on its own row of x, bit for bit, so a
// caller may split the tokens. Does not wait for the device. Throws InternalError, because the
// engine builds these arguments.
void invokeMoe(Device& device, const MoeParams& params);

}  // namespace turbomind
