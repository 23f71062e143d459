#include "turbomind/ops/moe.h"

#include <algorithm>

#include "turbomind/core/check.h"

namespace turbomind {
namespace {

void CheckMatrix(const MatrixView& matrix, int64_t rows, int64_t cols) {
  if (matrix.weight == nullptr) {
    FailCheck("every matrix of a layer of experts must be set", std::source_location::current());
  }
  Check(matrix.weight->rows == rows && matrix.weight->cols == cols,
        "the matrices of a layer of experts must match its sizes");
}

void CheckExperts(const std::vector<MatrixView>& experts, int num_experts, int64_t rows,
                  int64_t cols) {
  Check(experts.size() == static_cast<size_t>(num_experts),
        "there must be a matrix for every expert");
  for (const MatrixView& expert : experts) {
    CheckMatrix(expert, rows, cols);
    Check(expert.weight->format == experts.front().weight->format,
          "the experts of a layer must have one format");
  }
}

void CheckLayer(const MoeLayer& layer) {
  const int64_t hidden = layer.hidden_size;
  const int64_t inner = layer.intermediate_size;
  Check(hidden > 0 && inner > 0, "hidden_size and intermediate_size must be positive");
  Check(layer.top_k > 0 && layer.top_k <= layer.num_experts,
        "top_k must be positive and at most num_experts");
  CheckMatrix(layer.router, layer.num_experts, hidden);
  const int64_t outer = layer.expert_size();
  CheckExperts(layer.down, layer.num_experts, outer, inner);
  if (layer.interleaved()) {
    CheckExperts(layer.gate_up, layer.num_experts, 2 * inner, outer);
  } else {
    if (layer.gated()) {
      CheckExperts(layer.gate, layer.num_experts, inner, outer);
    }
    CheckExperts(layer.up, layer.num_experts, inner, outer);
  }
  if (layer.latent_size > 0) {
    CheckMatrix(layer.latent_down, outer, hidden);
    CheckMatrix(layer.latent_up, hidden, outer);
  }
  if (layer.weigh_inputs) {
    for (const std::vector<MatrixView>* views : {&layer.gate, &layer.up, &layer.gate_up}) {
      Check(
          std::ranges::all_of(*views, [](const MatrixView& view) { return view.bias == nullptr; }),
          "experts with weighed inputs must have no bias of gate and up");
    }
  }
  if (layer.shared_intermediate_size > 0) {
    Check((layer.shared_gate.weight != nullptr) == layer.gated(),
          "the shared expert must have a gate if the others have one, and only then");
    if (layer.gated()) {
      CheckMatrix(layer.shared_gate, layer.shared_intermediate_size, hidden);
    }
    CheckMatrix(layer.shared_up, layer.shared_intermediate_size, hidden);
    CheckMatrix(layer.shared_down, hidden, layer.shared_intermediate_size);
    if (layer.shared_router.weight != nullptr) {
      CheckMatrix(layer.shared_router, 1, hidden);
    }
  }
}

void CheckParams(const MoeParams& p) {
  Check(p.layer != nullptr && p.x != nullptr && p.out != nullptr, "layer, x and out must be set");
  CheckLayer(*p.layer);
  const MoeScratch& s = p.scratch;
  Check(s.logits != nullptr && s.weights != nullptr && s.ids != nullptr && s.slots != nullptr &&
            s.x_rows != nullptr && s.offsets != nullptr && s.gate_up != nullptr &&
            s.activated != nullptr && s.output != nullptr &&
            (s.slot_weights != nullptr || !p.layer->weigh_inputs) &&
            (s.latent != nullptr || p.layer->latent_size == 0),
        "every scratch buffer of the experts must be set");
  Check(p.num_tokens > 0 && p.num_tokens <= s.max_tokens,
        "the tokens must fit into the scratch memory");
}

LinearParams LinearOf(const MatrixView& matrix, const float* x, float* y, int num_rows) {
  return {.x = x,
          .x_stride = matrix.weight->cols,
          .parts = &matrix,
          .num_parts = 1,
          .y = y,
          .y_stride = matrix.weight->rows,
          .num_rows = num_rows};
}

void Project(Device& device, const MatrixView& matrix, const float* x, float* y, int num_rows,
             bool accumulate = false) {
  LinearParams params = LinearOf(matrix, x, y, num_rows);
  params.accumulate = accumulate;
  device.Linear(params);
}

// Complete the parameters of an activation of scratch.gate_up.
GatedActivationParams ActivationOf(const MoeParams& p, const GatedActivationParams& rows) {
  GatedActivationParams params = rows;
  params.gate_up = p.scratch.gate_up;
  params.out = p.scratch.activated;
  params.activation = p.layer->activation;
  params.limit = p.layer->swiglu_limit;
  params.gated = p.layer->gated();
  return params;
}

void Route(Device& device, const MoeParams& p) {
  const MoeLayer& layer = *p.layer;
  device.Project({.norm = p.norm,
                  .keeps_normed = true,
                  .linear = LinearOf(layer.router, p.router_x != nullptr ? p.router_x : p.x,
                                     p.scratch.logits, p.num_tokens)});
  device.AssignExperts(
      {.route = {.logits = p.scratch.logits,
                 .ids = p.scratch.ids,
                 .weights = p.scratch.weights,
                 .num_tokens = p.num_tokens,
                 .num_experts = layer.num_experts,
                 .top_k = layer.top_k,
                 .normalize = layer.normalize,
                 .sigmoid = layer.sigmoid,
                 .bias = layer.score_bias,
                 .expert_scale = layer.expert_scale,
                 .num_groups = layer.num_groups,
                 .top_groups = layer.top_groups,
                 .best_of_group = layer.best_of_group},
       .rows = {.ids = p.scratch.ids,
                .slots = p.scratch.slots,
                .x_rows = p.scratch.x_rows,
                .offsets = p.scratch.offsets,
                .num_tokens = p.num_tokens,
                .num_experts = layer.num_experts,
                .top_k = layer.top_k,
                .weights = p.scratch.weights,
                .slot_weights = layer.weigh_inputs ? p.scratch.slot_weights : nullptr}});
}

// One matrix of every expert. x_rows is as in GroupedLinearParams.
struct GroupedPart {
  const std::vector<MatrixView>* matrices = nullptr;  // [num_experts]
  const float* x = nullptr;
  const int32_t* x_rows = nullptr;
  float* y = nullptr;
  int64_t y_stride = 0;
};

GroupedLinearParams GroupedOf(const MoeParams& p, const GroupedPart& part) {
  return {.x = part.x,
          .x_stride = part.matrices->front().weight->cols,
          .x_rows = part.x_rows,
          .y = part.y,
          .y_stride = part.y_stride,
          .experts = part.matrices->data(),
          .num_experts = p.layer->num_experts,
          .offsets = p.scratch.offsets,
          .num_rows = p.num_tokens * p.layer->top_k};
}

// Compute the activations of the routed experts from `x`.
void ActivateExperts(Device& device, const MoeParams& p, const float* x) {
  const MoeLayer& layer = *p.layer;
  const MoeScratch& scratch = p.scratch;
  const int64_t inner = layer.intermediate_size;
  GroupedPart part = {.x = x,
                      .x_rows = scratch.x_rows,
                      .y = scratch.gate_up,
                      .y_stride = layer.num_inputs() * inner};
  // A weight of the input is one of gate and up, which have no bias.
  const GatedActivationParams activation =
      ActivationOf(p, {.num_rows = p.num_tokens * layer.top_k,
                       .dim = layer.intermediate_size,
                       .interleaved = layer.interleaved(),
                       .row_scales = layer.weigh_inputs ? scratch.slot_weights : nullptr});
  if (layer.interleaved()) {
    part.matrices = &layer.gate_up;
    device.GroupedGate({GroupedOf(p, part), activation});
    return;
  }
  if (layer.gated()) {
    part.matrices = &layer.gate;
    device.GroupedLinear(GroupedOf(p, part));
    part.y += inner;
  }
  part.matrices = &layer.up;
  device.GroupedLinear(GroupedOf(p, part));
  device.GatedActivation(activation);
}

void RunExperts(Device& device, const MoeParams& p) {
  const MoeLayer& layer = *p.layer;
  const MoeScratch& scratch = p.scratch;
  const bool is_latent = layer.latent_size > 0;
  if (is_latent) {
    Project(device, layer.latent_down, p.x, scratch.latent, p.num_tokens);
  }
  ActivateExperts(device, p, is_latent ? scratch.latent : p.x);
  device.GroupedLinear(GroupedOf(p, {.matrices = &layer.down,
                                     .x = scratch.activated,
                                     .y = scratch.output,
                                     .y_stride = layer.expert_size()}));
  device.CombineExperts({.y = scratch.output,
                         .slots = scratch.slots,
                         .weights = layer.weigh_inputs ? nullptr : scratch.weights,
                         .out = is_latent ? scratch.latent : p.out,
                         .num_tokens = p.num_tokens,
                         .top_k = layer.top_k,
                         .dim = layer.expert_size(),
                         .scale = layer.scale,
                         .accumulate = p.accumulate && !is_latent});
  if (is_latent) {
    Project(device, layer.latent_up, scratch.latent, p.out, p.num_tokens, p.accumulate);
  }
}

void RunSharedExpert(Device& device, const MoeParams& p) {
  const MoeLayer& layer = *p.layer;
  const MoeScratch& scratch = p.scratch;
  const int inner = layer.shared_intermediate_size;
  const bool weighted = layer.shared_router.weight != nullptr;
  if (weighted) {
    Project(device, layer.shared_router, p.x, scratch.weights, p.num_tokens);
  }
  const LinearPart gate_up[] = {layer.shared_gate, layer.shared_up};
  const int num_parts = layer.num_inputs();
  device.Project({.linear = {.x = p.x,
                             .x_stride = layer.hidden_size,
                             .parts = gate_up + 2 - num_parts,
                             .num_parts = num_parts,
                             .y = scratch.gate_up,
                             .y_stride = num_parts * int64_t{inner},
                             .num_rows = p.num_tokens},
                  .gate = ActivationOf(p, {.num_rows = p.num_tokens, .dim = inner})});
  Project(device, layer.shared_down, scratch.activated, scratch.output, p.num_tokens);
  device.CombineExperts({.y = scratch.output,
                         .weights = weighted ? scratch.weights : nullptr,
                         .sigmoid = weighted,
                         .out = p.out,
                         .num_tokens = p.num_tokens,
                         .top_k = 1,
                         .dim = layer.hidden_size});
}

}  // namespace

void invokeMoe(Device& device, const MoeParams& params) {
  CheckParams(params);
  Route(device, params);
  RunExperts(device, params);
  if (params.layer->shared_intermediate_size > 0) {
    RunSharedExpert(device, params);
  }
}

}  // namespace turbomind
