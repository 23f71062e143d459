#include "turbomind/model/decoder_scratch.h"

#include <algorithm>

namespace turbomind {
namespace {

class Placer {
 public:
  explicit Placer(std::byte* memory) : memory_(memory) {}

  template <class T>
  void Add(T*& target, int64_t count) {
    target = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + next_);
    next_ += (count * int64_t{sizeof(T)} + 63) / 64 * 64;
    num_bytes_ = std::max(num_bytes_, next_);
  }

  // Offset of the next buffer. Going back makes buffers share memory.
  int64_t next() const { return next_; }
  void GoBack(int64_t next) { next_ = next; }

  int64_t num_bytes() const { return num_bytes_; }

 private:
  std::byte* memory_;
  int64_t next_ = 0;
  int64_t num_bytes_ = 0;
};

void PlaceMoe(const ModelConfig& model, int64_t rows, MoeScratch& scratch, Placer& placer) {
  const MoeConfig& moe = model.moe;
  const int64_t slots = rows * moe.top_k;
  const int64_t width =
      std::max(int64_t{moe.top_k} * moe.intermediate_size, int64_t{moe.shared_intermediate_size});
  scratch.max_tokens = static_cast<int>(rows);
  placer.Add(scratch.logits, rows * moe.num_experts);
  placer.Add(scratch.weights, slots);
  placer.Add(scratch.ids, slots);
  placer.Add(scratch.slots, slots);
  placer.Add(scratch.x_rows, slots);
  scratch.slot_weights = nullptr;
  if (moe.weigh_inputs) {
    placer.Add(scratch.slot_weights, slots);
  }
  placer.Add(scratch.offsets, moe.num_experts + 1);
  placer.Add(scratch.gate_up, rows * 2 * width);
  placer.Add(scratch.activated, rows * width);
  const int expert_size = moe.latent_size > 0 ? moe.latent_size : model.hidden_size;
  placer.Add(scratch.output, std::max(slots * expert_size, rows * int64_t{model.hidden_size}));
  scratch.latent = nullptr;
  if (moe.latent_size > 0) {
    placer.Add(scratch.latent, rows * moe.latent_size);
  }
}

// The rows of the absorbed queries of a pass: 16 MiB each of queries and sums at a rank of 512.
// More rows would read no latent less often in a usual step.
constexpr int64_t kAbsorbedRows = 8192;
constexpr int kHeadsAtOnce = 16;  // the least that a pass has: those that kernels compute at once

void PlaceLatents(const ModelConfig& model, int64_t tokens, LatentScratch& scratch,
                  Placer& placer) {
  const LatentConfig& latent = model.latent;
  const int64_t rank = model.head_dim;
  const int64_t heads = std::min(model.num_heads, kHeadsAtOnce);
  scratch.absorbed_rows =
      std::min(tokens * model.num_heads, std::max(tokens * heads, kAbsorbedRows));
  placer.Add(scratch.q_latents, tokens * latent.q_rank);
  placer.Add(scratch.q, tokens * model.QuerySize());
  placer.Add(scratch.rows, tokens * (rank + latent.rope_dim));
  placer.Add(scratch.absorbed, scratch.absorbed_rows * rank);
  placer.Add(scratch.sums, scratch.absorbed_rows * rank);
}

}  // namespace

int LatentScratch::HeadsOfPass(int num_heads, int num_tokens) const {
  const int64_t fits = absorbed_rows / num_tokens;
  return fits >= num_heads ? num_heads : static_cast<int>(fits / kHeadsAtOnce * kHeadsAtOnce);
}

int64_t DecoderScratch::Place(const ModelConfig& model, const StepLimits& limits,
                              std::byte* memory) {
  const int64_t tokens = limits.max_tokens;
  const int64_t logit_rows = limits.max_logit_rows;
  const int64_t ffn_rows = std::min(limits.max_tokens, limits.ffn_rows);
  int64_t q_size = 0;
  int64_t qkv_size = 0;
  int64_t inner = 0;
  for (int i = 0; i < model.num_layers; ++i) {
    q_size = std::max(q_size, model.HasAttention(i) ? model.QSize(i) : 0);
    qkv_size = std::max(qkv_size, model.HasAttention(i) ? model.QkvSize(i) : 0);
    inner = std::max(inner, int64_t{model.IntermediateSize(i)});
  }
  Placer placer(memory);
  placer.Add(num_nonfinite, 1);
  placer.Add(num_clipped, model.num_layers);
  placer.Add(chosen, logit_rows);
  placer.Add(hidden, tokens * model.hidden_size);
  placer.Add(normed, tokens * model.hidden_size);
  placer.Add(branch, model.ChangesBranches() ? tokens * model.hidden_size : 0);
  const auto place_ropes = [&](std::vector<RopeAngles>& angles, bool exist) {
    angles.resize(model.ropes.size());
    for (size_t i = 0; i < angles.size(); ++i) {
      const RopeConfig& rope = model.ropes[i];
      const int64_t half = rope.kind == RopeKind::kNone || !exist ? 0 : rope.dim / 2;
      placer.Add(angles[i].cos, tokens * half);
      placer.Add(angles[i].sin, tokens * half);
    }
  };
  place_ropes(ropes, true);
  place_ropes(block_ropes, model.k_bias);
  const int64_t inputs = int64_t{model.num_layers} * model.per_layer.size;
  placer.Add(per_layer, tokens * inputs);
  placer.Add(selected, logit_rows * model.hidden_size);
  placer.Add(logits, logit_rows * model.vocab_size);
  const int64_t layer = placer.next();
  placer.Add(per_layer_rows, ffn_rows * inputs);
  placer.GoBack(layer);
  if (model.latent.exists()) {
    PlaceLatents(model, tokens, latent, placer);
  } else {
    placer.Add(qkv, tokens * qkv_size);
  }
  placer.Add(attended, tokens * (model.latent.exists() ? model.AttendedSize() : q_size));
  placer.Add(q_dot_mean, limits.removes_mean ? tokens * model.num_heads : 0);
  placer.Add(attention_gate, model.attention_gate ? tokens * q_size : 0);
  if (!model.HasSumOfMixers()) {
    placer.GoBack(layer);
  }
  if (const RecurrentConfig& recurrent = model.recurrent; recurrent.HasAny()) {
    placer.Add(projected, tokens * recurrent.InputSize());
    placer.Add(convolved, tokens * recurrent.Channels());
    placer.Add(mixed, tokens * recurrent.ValueSize());
  }
  placer.GoBack(layer);
  if (model.HasDenseLayer()) {
    placer.Add(gate_up, ffn_rows * (model.gated ? 2 : 1) * inner);
    placer.Add(activated, ffn_rows * inner);
  }
  if (model.moe.num_experts > 0) {
    PlaceMoe(model, ffn_rows, moe, placer);
    const int64_t beside = model.moe.beside_dense ? ffn_rows * model.hidden_size : 0;
    placer.Add(router_input, beside);
    placer.Add(expert_branch, beside);
  }
  placer.GoBack(layer);
  placer.Add(per_layer_gate, ffn_rows * model.per_layer.size);
  return placer.num_bytes();
}

}  // namespace turbomind
