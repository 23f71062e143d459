#pragma once

// ⑧ From a step's hidden states to tokens: logits of the rows that need them, log-probabilities,
// sampling, stop conditions. Fills Sequence::tokens and Sequence::output.
//
// A row of which nothing is asked but a token, the highest or one sampled from the row as it is,
// stays with a device that chooses it itself: the token alone comes to the host.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "turbomind/core/function_ref.h"
#include "turbomind/engine/batch.h"
#include "turbomind/engine/token_masks.h"
#include "turbomind/model/decoder.h"
#include "turbomind/ops/sampling.h"

namespace turbomind {

// What goes wrong with one request (its callback, its parameters, its memory) ends that request
// with kError; the others of the batch do not notice. Engine thread only.
class OutputProcessor {
 public:
  // `max_sequence_len`: a sequence that reaches it ends with kLength. Up to `max_batch_size` rows a
  // step asks for no memory. Sequences are handled side by side on the host threads of `device`,
  // those with a token mask after the others: masks may still be asked for meanwhile.
  OutputProcessor(int vocab_size, int64_t max_sequence_len, int max_batch_size, Device& device);

  // Before the decoder runs the planned batch: asks for what can be asked by then, and chooses
  // rows.
  void Begin(const Batch& batch);
  // Token indices of the batch whose logits Run needs, ascending.
  std::span<const int32_t> rows() const { return row_indices_; }
  // REQUIRES: Begin, then the decoder has run that batch with rows(), then Scheduler::StepDone was
  // called.
  void Run(Decoder& decoder);
  // The step has failed between the two.
  void Drop() { masks_.Drop(); }

 private:
  struct Row {
    Sequence* sequence = nullptr;
    int64_t position = 0;
    int32_t chosen = -1;      // by the device; -1: the row is on the host
    int32_t prompt_row = -1;  // among prompt_logprobs_; -1: not asked for
  };
  // Rows of one sequence, in order, of those whose logits are there.
  struct SequenceRows {
    const Row* rows = nullptr;
    size_t num_rows = 0;
    float* logits = nullptr;  // [num_rows, vocab] of those without a token of the device
    std::span<const uint32_t> mask = {};  // of the last row; empty: none, or generation must stop
  };

  void CollectRows(const Batch& batch);
  void ArgMaxOnDevice(std::span<Row> rows, Decoder& decoder);
  void SampleOnDevice(std::span<Row> rows, Decoder& decoder);
  float* ReadLogits(std::span<const Row> rows, Decoder& decoder);
  void HandleRows(std::span<Row> rows, float* logits);
  // Rows are independent of each other: those of one long prompt need all threads.
  void ComputePromptLogprobs(std::span<Row> rows, const float* logits);
  void HandleRuns(std::span<const SequenceRows> runs);
  void HandleRun(const SequenceRows& run, Sampler& sampler);
  void HandleRow(const Row& row, float* logits, std::span<const uint32_t> mask, Sampler& sampler);
  void TakeMask(SequenceRows& run);
  void ChooseToken(Sequence& sequence, float* logits, std::span<const uint32_t> mask,
                   Sampler& sampler);
  // Runs `fn` for all items, on all host threads where they work on enough logits.
  void ForEach(int64_t num_items, FunctionRef<void(int64_t item, int thread)> fn);
  void AppendToken(Sequence& sequence, int32_t token) const;
  void AppendLogits(Sequence& sequence, const float* logits);
  void CheckStop(Sequence& sequence) const;

  int vocab_size_;
  int64_t max_sequence_len_;
  Device& device_;
  std::vector<Sampler> samplers_;  // by thread
  TokenMasks masks_;
  std::vector<Row> rows_;
  std::vector<int32_t> row_indices_;
  std::vector<int32_t> chosen_;  // by the device
  std::vector<RowSampling> samplings_;
  std::vector<int32_t> read_rows_;                                // whose logits are on the host
  std::vector<SequenceRows> runs_;                                // that threads share
  std::vector<SequenceRows> masked_runs_;                         // those with a token mask
  std::vector<std::pair<const Row*, const float*>> prompt_rows_;  // with their logits
  std::vector<std::optional<TokenLogprobs>> prompt_logprobs_;     // of these; empty: memory lacked
};

// Ends a sequence with kError.
void Fail(Sequence& sequence, const std::string& error, bool is_request_fault);

}  // namespace turbomind
