#pragma once

// ⑤→⑧ One forward pass over one batch. What a step computes; not what it plans (engine/scheduler)
// nor what it stores where (kv/).

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "turbomind/model/decoder_scratch.h"
#include "turbomind/model/kv_statistics.h"
#include "turbomind/model/model_config.h"
#include "turbomind/model/weights.h"
#include "turbomind/ops/device.h"
#include "turbomind/ops/rope.h"

namespace turbomind {

// Where a layer's K and V of this step go and come from.
struct LayerCache {
  KvLayerView kv;
  KvLayerView window16;  // data null where there is no 16-bit window
  PrecisionWindow rule;
  const float* k_mean = nullptr;
  int group = 0;   // of the batch views
  int window = 0;  // 0: full attention
};

// Everything a decoder is made of but the weights and the device.
struct DecoderConfig {
  ModelConfig model;
  std::vector<LayerCache> layers;  // one per layer
  bool rotate_k = false;
  bool search_scales = false;
  StepLimits limits;  // removes_mean: also where `layers` say so
  // Sees K and V of every step as they are stored, if set. On CPU only.
  KvStatistics* statistics = nullptr;
};

// One step's input. `batch` has one view per layer group: they differ in their block tables alone.
struct DecoderInput {
  const int32_t* tokens = nullptr;   // [num_tokens]
  std::span<const BatchView> batch;  // [num_groups]
  // Token indices, ascending, whose logits may be asked for afterwards. Behind the last layer's
  // attention a step that reads prompts goes on with these alone; without any it ends with K and V.
  std::span<const int32_t> rows;
};

// A decoder over a device. Owns its scratch, sized once for the limits of a step; a step
// allocates nothing.
//
// Invariant: a row of the hidden states and of the logits depends on its own sequence alone, bit
// for bit (each op's contract), whatever the batch, the chunking or the number of threads. Called
// by the engine thread alone.
class Decoder {
 public:
  // Throws std::bad_alloc.
  Decoder(DecoderConfig config, std::shared_ptr<const Weights> weights, Device& device);
  ~Decoder();
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;

  // Runs all layers; the hidden states of the input's rows stay until the next call.
  // REQUIRES: num_tokens <= limits.max_tokens, every token id in the vocabulary, the blocks of
  // every position present.
  void Forward(const DecoderInput& input);

  // Logits of the input's rows [first, first + num_rows), for the functions that follow.
  // REQUIRES: num_rows <= max_logit_rows.
  void ComputeLogits(int first, int num_rows);
  // Writes what ArgMaxRowsParams says of each of them, [num_rows]. False, and nothing is written,
  // where the device leaves that to the host.
  bool ArgMaxTokens(int32_t* tokens);
  // The same of SampleRowsParams, [samplings.size()]; their rows are of these.
  bool SampleTokens(std::span<const RowSampling> samplings, int32_t* tokens);
  // Some of them, ascending indices of [0, num_rows): [rows.size(), vocab_size] on the host, valid
  // until the next call, free to overwrite. Then the logits are gone.
  float* ReadLogits(std::span<const int32_t> rows);

  int max_logit_rows() const { return config_.limits.max_logit_rows; }
  int64_t scratch_bytes() const { return scratch_bytes_; }
  // Of all steps up to the last whose tokens or logits were read: waits for nothing.
  int64_t num_nonfinite() const { return num_nonfinite_; }
  // The same of values that a format has clipped, by layer group.
  std::span<const int64_t> num_clipped() const { return num_clipped_; }

 private:
  struct Output {
    float* y = nullptr;
    int num_rows = 0;
    bool accumulate = false;
  };

  void RunLayers(const DecoderInput& input);
  void Attention(int index, const BatchView& batch, bool include_prefill);
  // Moves rows of [num_tokens, width] to its beginning.
  void GatherRows(std::span<const int32_t> rows, float* values, int64_t width);
  void WriteKv(int index, const BatchView& batch);
  void FeedForward(int index, int num_tokens);
  void DenseFeedForward(const LayerWeights& layer, int64_t first, int num_rows);
  void Project(const LinearWeight& weight, const float* bias, const float* x, const Output& out);
  void Norm(const VectorWeight& weight, const float* x, float* out, int num_rows);

  void ReadTokens(size_t count, int32_t* tokens);
  void ReadCounts(const std::byte* read);
  size_t OffsetOfClipped() const;

  const ModelConfig& model() const { return config_.model; }

  DecoderConfig config_;
  std::shared_ptr<const Weights> weights_;
  Device& device_;
  RopeTable rope_;
  DeviceArray inv_freq_;                // of rope_
  std::vector<StepGroup> step_groups_;  // by layer group
  std::vector<MoeLayer> experts_;       // [num_layers], empty where a layer is dense
  int64_t scratch_bytes_ = 0;
  std::byte* memory_ = nullptr;
  DecoderScratch scratch_;
  int num_rows_ = 0;        // whose hidden states are in the scratch
  int num_logit_rows_ = 0;  // whose logits are
  int64_t num_nonfinite_ = 0;
  std::vector<int64_t> num_clipped_;
  bool count_is_old_ = false;  // the counts are those of an earlier step
};

}  // namespace turbomind
