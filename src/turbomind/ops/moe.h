#pragma once

// ⑥⑦ Mixture of experts: a router gives each token a few experts of many; their outputs, weighted,
// are added to the residual, as is that of a shared expert where there is one.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "turbomind/ops/device.h"

namespace turbomind {

// One matrix and its bias.
using MatrixView = LinearPart;

// The weights of one layer's experts, seen; they must outlive it.
struct MoeLayer {
  int hidden_size = 0;
  int num_experts = 0;
  int top_k = 0;
  int intermediate_size = 0;         // of one expert
  int shared_intermediate_size = 0;  // 0: no shared expert
  bool normalize = false;            // a token's weights sum to 1
  Activation activation = Activation::kSilu;
  float swiglu_limit = 0.f;

  MatrixView router = {};  // [num_experts, hidden]
  // Each [num_experts]: gate and up, or neither and gate_up, whose rows alternate between them.
  std::vector<MatrixView> gate = {}, up = {};
  std::vector<MatrixView> gate_up = {};  // [2 * intermediate, hidden]
  std::vector<MatrixView> down = {};     // [num_experts] of [hidden, intermediate]

  MatrixView shared_gate = {}, shared_up = {}, shared_down = {};
  MatrixView shared_router = {};  // [1, hidden]: its sigmoid weighs the shared expert

  bool empty() const { return num_experts == 0; }
  bool interleaved() const { return !gate_up.empty(); }
};

// Where the op works. Widths are per token: gate_up_width is 2 · intermediate for each of top_k
// experts or for the shared one, whichever is more.
struct MoeScratch {
  int max_tokens = 0;
  float* logits = nullptr;     // [max_tokens, num_experts]
  float* weights = nullptr;    // [max_tokens, top_k]
  int32_t* ids = nullptr;      // [max_tokens, top_k]
  int32_t* slots = nullptr;    // [max_tokens, top_k]
  int32_t* x_rows = nullptr;   // [max_tokens * top_k]
  int32_t* offsets = nullptr;  // [num_experts + 1]
  float* gate_up = nullptr;    // [max_tokens, gate_up_width]
  float* activated = nullptr;  // [max_tokens, gate_up_width / 2]
  float* output = nullptr;     // [max_tokens, top_k * hidden]
};

struct MoeParams {
  const MoeLayer* layer = nullptr;
  const float* x = nullptr;  // [num_tokens, hidden], normed
  float* out = nullptr;      // [num_tokens, hidden], added to
  int num_tokens = 0;        // at most scratch.max_tokens
  MoeScratch scratch;
};

// out += experts(x). Tokens are grouped by expert: each expert that any of them has is read once,
// the others are not. A row of out depends on its own row of x alone, bit for bit, so that a caller
// may cut the tokens as it likes. Waits for nothing. Throws InternalError: the engine builds these
// arguments.
void invokeMoe(Device& device, const MoeParams& params);

}  // namespace turbomind
