#pragma once

// ⑤→⑧ One forward pass over one batch. The decoder computes a step; engine/scheduler plans it and
// kv/ decides where K and V are stored.

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "turbomind/model/decoder_scratch.h"
#include "turbomind/model/k_bias_arrays.h"
#include "turbomind/model/kv_statistics.h"
#include "turbomind/model/layer_cache.h"
#include "turbomind/model/model_config.h"
#include "turbomind/model/weights.h"
#include "turbomind/ops/device.h"
#include "turbomind/ops/rope.h"

namespace turbomind {

// All parameters of a decoder except the weights and the device.
struct DecoderConfig {
  ModelConfig model;
  std::vector<LayerCache> layers;  // one per layer
  // For recurrent layers: whole slots of the working states and the checkpoints.
  StateView states = {};
  StateView checkpoints = {};
  StateFormat checkpoint_format = StateFormat::kF32;
  bool rotate_k = false;  // or the latents
  bool search_scales = false;
  int max_positions = 0;  // of a sequence; needed by a bias of K beside K offsets
  StepLimits limits;      // removes_mean is also set if a layer has k_mean
  // If set, receives K and V of every step as they are stored. Needs collects_kv_statistics.
  KvStatistics* statistics = nullptr;
};

// The input of one step. `batch` has one view per layer group; the views differ only in their block
// tables.
struct DecoderInput {
  const int32_t* tokens = nullptr;   // [num_tokens]
  std::span<const BatchView> batch;  // [num_groups]
  // Ascending token indices whose logits may be computed afterwards. After the last layer's
  // attention, a prefill step keeps only these rows. If there are none, it stops once the last
  // layer with K and V has written them.
  std::span<const int32_t> rows;
  // For recurrent layers. `restores` are copied from checkpoints before the step, and `checkpoints`
  // to them after it.
  StateBatch states = {};
  std::span<const StateCopy> restores = {};
  std::span<const StateCopy> checkpoints = {};
};

// A decoder on one device. It owns its scratch memory, sized once for the limits of a step, so a
// step allocates nothing.
//
// Invariant: a row of the hidden states and of the logits depends on its own sequence alone, bit
// for bit. Batch, chunking and number of threads do not matter (each op guarantees this). Only the
// engine thread may call it.
class Decoder {
 public:
  // Throws std::bad_alloc.
  Decoder(DecoderConfig config, std::shared_ptr<const Weights> weights, Device& device);
  ~Decoder();
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;

  // Runs all layers. The hidden states of the input's rows are valid until the next call. REQUIRES:
  // num_tokens <= limits.max_tokens, every token id is in the vocabulary, and every visible
  // position has a block.
  void Forward(const DecoderInput& input);

  // Returns the final hidden states of the input's rows [first, first + num_rows), after the final
  // norm: [num_rows, hidden_size] on the host. They are valid until the next call. REQUIRES:
  // num_rows <= max_logit_rows.
  const float* ReadHidden(int first, int num_rows);
  // Computes the logits of the input's rows [first, first + num_rows) for the following functions.
  // REQUIRES: num_rows <= max_logit_rows.
  void ComputeLogits(int first, int num_rows);
  // Writes the argmax of each row (ArgMaxRowsParams), [num_rows]. Returns false and writes nothing
  // if the device does not support it.
  bool ArgMaxTokens(int32_t* tokens);
  // Samples tokens (SampleRowsParams), [samplings.size()], like ArgMaxTokens. The samples refer to
  // the computed rows.
  bool SampleTokens(std::span<const RowSampling> samplings, int32_t* tokens);
  // Returns the logits of some rows, given as ascending indices in [0, num_rows): [rows.size(),
  // vocab_size] on the host. They are valid until the next call and may be overwritten. The
  // device's copy is lost.
  float* ReadLogits(std::span<const int32_t> rows);

  int hidden_size() const { return model().hidden_size; }
  int max_logit_rows() const { return config_.limits.max_logit_rows; }
  int64_t scratch_bytes() const { return scratch_bytes_; }
  // Returns the count of all steps up to the last one whose tokens or logits were read. Does not
  // wait.
  int64_t num_nonfinite() const { return num_nonfinite_; }
  // Like num_nonfinite, but counts the values that a KV format clipped, by layer group.
  std::span<const int64_t> num_clipped() const { return num_clipped_; }

 private:
  // The input of a branch: x, or its norm. With a norm, the input's only reader computes it on the
  // way, in `normed`.
  struct Input {
    const float* x = nullptr;
    const NormWeight* norm = nullptr;
    float* normed = nullptr;  // same size as x
  };
  struct Output {
    float* y = nullptr;
    int num_rows = 0;
    bool accumulate = false;
  };

  void FillRopes(const BatchView& batch);
  void RunLayers(const DecoderInput& input);
  // Mixes the tokens of each sequence: computes `attended` and `mixed`, of which a layer has at
  // least one, from the input [num_tokens, hidden]. With `only_rows`, they and `hidden` and
  // `normed` then have only the input's rows; returns false if there are none.
  bool Mix(int index, const Input& x, const DecoderInput& input, bool only_rows);
  bool Attend(int index, const Input& x, const DecoderInput& input, bool only_rows);
  // Returns the input of the layer's mixers. Computes the norm unless its reader can.
  Input MixerInput(int index, int num_tokens);
  // Attends over latents (decoder_latent.cc): computes `attended` from x, as Attend does.
  bool AttendLatents(int index, const float* x, const DecoderInput& input, bool only_rows);
  void ProjectLatents(int index, const float* x, int num_tokens);
  void WriteLatents(int index, const BatchView& batch);
  void LatentHeads(int index, const BatchView& batch, int first_head, int num_heads);
  void AddMixers(int index, int num_rows);
  void Attention(int index, const BatchView& batch, bool include_prefill);
  void Recur(int index, const Input& x, const DecoderInput& input);
  StateCopyParams CopiesOf(std::span<const StateCopy> copies) const;
  void UpdateMatrices(int index, const DecoderInput& input);
  // Moves rows of [num_tokens, width] to the beginning of `values`.
  void GatherRows(std::span<const int32_t> rows, float* values, int64_t width);
  void WriteKv(int index, const BatchView& batch);
  void FeedForward(int index, int num_tokens);
  void AddExpertsBeside(int index, int first, int rows);  // decoder_experts.cc
  // Per-layer inputs (decoder_per_layer.cc): compute those of all layers, and add a layer's branch.
  void FillPerLayerInputs(const DecoderInput& input);
  void AddPerLayerInputs(int index, int num_rows);
  void DenseFeedForward(int index, const Input& x, const Output& out);
  // Writes each part of the weight to its own columns of y. `gate` is as in ProjectParams.
  void Project(const LinearWeight& weight, const float* bias, const Input& x, const Output& out,
               const GatedActivationParams& gate = {});
  void NormHeads(int index, int num_tokens);
  NormParams NormOf(const NormWeight& norm, const float* x, float* out, int num_rows) const;
  // Returns where a branch writes its rows from `first` on: its own buffer if the model changes
  // branches, else `hidden`, to which the rows are added.
  Output BranchOutput(int first, int num_rows) const;
  void AddBranch(const NormWeight& norm, int num_rows);

  NormParams FinalNorm(int first, int num_rows) const;  // into scratch_.selected
  void ReadOldCounts();
  void ReadTokens(size_t count, int32_t* tokens);
  void ReadCounts(const std::byte* read);
  size_t OffsetOfClipped() const;

  const ModelConfig& model() const { return config_.model; }

  DecoderConfig config_;
  std::shared_ptr<const Weights> weights_;
  Device& device_;
  std::vector<RopeTable> ropes_;        // as ModelConfig::ropes
  std::vector<DeviceArray> inv_freqs_;  // of ropes_
  KBiasArrays k_biases_;
  std::vector<StepGroup> step_groups_;  // by layer group
  std::vector<MoeLayer> experts_;       // [num_layers], empty for dense layers
  int64_t scratch_bytes_ = 0;
  int last_mixer_ = 0;   // the last layer that mixes tokens
  int last_writer_ = 0;  // the last layer that stores K and V or a state
  std::byte* memory_ = nullptr;
  DecoderScratch scratch_;
  int num_rows_ = 0;        // rows whose hidden states are in the scratch
  int num_logit_rows_ = 0;  // rows whose logits are in the scratch
  int64_t num_nonfinite_ = 0;
  std::vector<int64_t> num_clipped_;
  bool count_is_old_ = false;  // the counts belong to an earlier step
};

}  // namespace turbomind
