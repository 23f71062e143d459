#pragma once

// ⑧ Turns a step's hidden states into tokens: computes the needed logits and log-probabilities,
// samples, and checks stop conditions. Fills Sequence::tokens and Sequence::output. Pools the
// hidden states of prompts that ask for it.
//
// If only the next token is needed, the device samples it (argmax or random) and copies back the
// token instead of the logits. This requires a device that can sample and unmodified logits.

#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "turbomind/core/function_ref.h"
#include "turbomind/engine/batch.h"
#include "turbomind/engine/token_masks.h"
#include "turbomind/model/decoder.h"
#include "turbomind/ops/sampling.h"

namespace turbomind {

// An error of one request (its callback, parameters or memory) ends that request with kError and
// does not affect the rest of the batch. Only the engine thread may use it.
class OutputProcessor {
 public:
  // A sequence that reaches `max_sequence_len` ends with kLength. Steps of up to `max_rows` rows
  // allocate nothing. The host threads of `device` handle sequences in parallel. Sequences
  // with a token mask come last, so that their masks can be computed meanwhile.
  OutputProcessor(int vocab_size, int64_t max_sequence_len, int max_rows, Device& device);

  // Starts computing token masks and selects rows. Call it before the decoder runs the planned
  // batch.
  void Begin(const Batch& batch);
  // Returns the batch's token indices whose logits Run needs, ascending.
  std::span<const int32_t> rows() const { return row_indices_; }
  // Chooses the tokens of the step. REQUIRES: Begin was called, then the decoder ran the batch with
  // rows(). Scheduler::StepDone follows.
  void Run(Decoder& decoder);
  // Ends a step that failed between Begin and Run.
  void Drop() { masks_.Drop(); }

 private:
  struct Row {
    Sequence* sequence = nullptr;
    int64_t position = 0;
    int32_t token = 0;        // at `position`, maybe of a draft
    int32_t chosen = -1;      // chosen by the device; -1: the row is on the host
    int32_t prompt_row = -1;  // index into prompt_logprobs_; -1: not requested
  };
  // Consecutive rows of one sequence whose logits were computed.
  struct SequenceRows {
    const Row* rows = nullptr;
    size_t num_rows = 0;
    float* logits = nullptr;  // [num_rows, vocab] for rows without a token from the device
    std::span<const uint32_t> mask = {};  // of the last row; empty: none, or stop here
  };

  // Returns whether the row's token is the sequence's. That of a refused draft is not.
  static bool IsComputed(const Row& row);
  void CollectRows(const Batch& batch);
  // Chooses the tokens of up to max_logit_rows rows that need logits.
  void RunLogits(size_t first, size_t count, Decoder& decoder);
  // Pools up to max_logit_rows rows of prompts that need no logits.
  void RunPooling(size_t first, size_t count, Decoder& decoder);
  void ArgMaxOnDevice(std::span<Row> rows, Decoder& decoder);
  void SampleOnDevice(std::span<Row> rows, Decoder& decoder);
  float* ReadLogits(std::span<const Row> rows, Decoder& decoder);
  void HandleRows(std::span<Row> rows, float* logits);
  // Computes log-probabilities row by row, because the rows of one long prompt need all threads.
  void ComputePromptLogprobs(std::span<Row> rows, const float* logits);
  void HandleRuns(std::span<const SequenceRows> runs);
  void HandleRun(const SequenceRows& run, Sampler& sampler);
  // Ends the run before its first row of a draft and puts the others into drafted_runs_.
  void SplitDraft(SequenceRows& run);
  void HandleDraft(const SequenceRows& run);
  void HandleRow(const Row& row, float* logits, std::span<const uint32_t> mask, Sampler& sampler);
  void TakeMask(SequenceRows& run);
  void ChooseToken(Sequence& sequence, float* logits, std::span<const uint32_t> mask,
                   Sampler& sampler);
  // Runs `fn` for all items. It uses all host threads if there are enough logits to share.
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
  std::vector<int32_t> chosen_;  // tokens chosen by the device
  std::vector<RowSampling> samplings_;
  std::vector<int32_t> read_rows_;          // rows with logits on the host
  std::vector<SequenceRows> runs_;          // runs that threads share
  std::vector<SequenceRows> masked_runs_;   // runs with a token mask
  std::vector<SequenceRows> drafted_runs_;  // their rows that need a mask of their own
  std::vector<std::pair<const Row*, const float*>> prompt_rows_;  // rows and their logits
  std::vector<std::optional<TokenLogprobs>> prompt_logprobs_;     // empty if memory was short
};

// Ends a sequence with kError. InvalidArgument means that its request was wrong.
void Fail(Sequence& sequence, const std::exception& error);

}  // namespace turbomind
