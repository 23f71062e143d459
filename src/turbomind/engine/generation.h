#pragma once

// ⑧ From a step's hidden states to tokens: logits of the rows that need them, log-probabilities,
// sampling, stop conditions. Fills Sequence::tokens and Sequence::output.
//
// A row of which nothing is asked but a token, the highest or one drawn from the row as it is,
// stays with a device that chooses it itself: the token alone comes to the host.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "turbomind/engine/batch.h"
#include "turbomind/engine/token_masks.h"
#include "turbomind/model/decoder.h"
#include "turbomind/ops/sampling.h"

namespace turbomind {

// What goes wrong with one request (its callback, its parameters, its memory) ends that request
// with kError; the others of the batch do not notice. Engine thread only.
class Generation {
 public:
  // `max_sequence_len`: a sequence that reaches it ends with kLength. Sequences without a token
  // mask are handled on the host threads of `device`, side by side.
  Generation(int vocab_size, int64_t max_sequence_len, Device& device);

  // What can be asked before the decoder runs the planned batch.
  void Begin(const Batch& batch) { masks_.Begin(batch); }
  // REQUIRES: Begin, then the decoder has run `batch`, then Scheduler::StepDone was called.
  void Run(const Batch& batch, Decoder& decoder);
  // The step has failed between the two.
  void Drop() { masks_.Drop(); }

 private:
  struct Row {
    Sequence* sequence = nullptr;
    int64_t position = 0;
    int32_t chosen = -1;  // by the device; -1: the row is on the host
  };
  // Rows of one sequence, in order, of those whose logits are there.
  struct SequenceRows {
    const Row* rows = nullptr;
    size_t num_rows = 0;
    float* logits = nullptr;  // [num_rows, vocab] of those without a token of the device
  };

  void CollectRows(const Batch& batch);
  void AskHighest(std::span<Row> rows, Decoder& decoder);
  void AskDrawn(std::span<Row> rows, Decoder& decoder);
  float* ReadLogits(std::span<const Row> rows, Decoder& decoder);
  void HandleRows(std::span<const Row> rows, float* logits);
  void HandleRun(const SequenceRows& run, Sampler& sampler);
  void HandleRow(const Row& row, float* logits, Sampler& sampler);
  void ChooseToken(Sequence& sequence, float* logits, Sampler& sampler);
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
  std::vector<RowDraw> draws_;
  std::vector<int32_t> read_rows_;  // whose logits are on the host
  std::vector<SequenceRows> runs_;  // that threads share
};

// Ends a sequence with kError.
void Fail(Sequence& sequence, const std::string& error, bool is_request_fault);

}  // namespace turbomind
