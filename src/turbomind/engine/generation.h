#pragma once

// ⑧ From a step's hidden states to tokens: logits of the rows that need them, log-probabilities,
// sampling, stop conditions. Fills Sequence::tokens and Sequence::output.

#include <cstdint>
#include <string>
#include <vector>

#include "turbomind/engine/batch.h"
#include "turbomind/model/decoder.h"
#include "turbomind/ops/sampling.h"

namespace turbomind {

// What goes wrong with one request (its callback, its parameters, its memory) ends that request
// with kError; the others of the batch do not notice. Engine thread only.
class Generation {
 public:
  // `max_sequence_len`: a sequence that reaches it ends with kLength.
  Generation(int vocab_size, int64_t max_sequence_len);

  // REQUIRES: the decoder has just run `batch`, and Scheduler::StepDone was called.
  void Run(const Batch& batch, Decoder& decoder);

 private:
  struct Row {
    Sequence* sequence = nullptr;
    int64_t position = 0;
  };

  void HandleRow(const Row& row, float* logits);
  void ChooseToken(Sequence& sequence, float* logits);
  void AppendLogits(Sequence& sequence, const float* logits);
  bool AskTokenMask(Sequence& sequence);
  void CheckStop(Sequence& sequence) const;

  int vocab_size_;
  int64_t max_sequence_len_;
  Sampler sampler_;
  std::vector<uint32_t> mask_;  // [ceil(vocab / 32)]
  std::vector<Row> rows_;
  std::vector<int32_t> row_indices_;
};

// Ends a sequence with kError.
void Fail(Sequence& sequence, const std::string& error);

}  // namespace turbomind
