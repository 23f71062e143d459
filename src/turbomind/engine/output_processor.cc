// ⑧ Turns a step's hidden states into tokens.

#include "turbomind/engine/output_processor.h"

#include <algorithm>
#include <exception>
#include <functional>

#include "turbomind/core/check.h"

namespace turbomind {
namespace {

// With fewer logits, waking a thread costs more than the rows: 10 us of sampling.
constexpr int64_t kMinParallelLogits = 1 << 15;

// Returns the first of the positions [begin, end) of this step whose logits are needed.
int64_t FirstRow(const Sequence& sequence, int64_t begin, int64_t end) {
  const bool is_last = end >= sequence.num_tokens();
  int64_t first = is_last ? sequence.num_tokens() - 1 : end;
  const Request& request = *sequence.request;
  if (request.logits_output == LogitsOutput::kAll) {
    first = std::min(first, std::max(begin, sequence.next_logits_row));
  }
  if (request.pooling == Pooling::kMean) {
    first = std::min(first, std::max(begin, sequence.next_pooled_row));
  }
  const int64_t next = std::max(begin, sequence.next_prompt_row);
  if (request.num_prompt_logprobs >= 0 && next + 1 < sequence.num_prompt) {
    first = std::min(first, next);
  }
  return first;
}

// Returns the length of the longest stop sequence at the end of the generated tokens.
int64_t MatchedStop(const Sequence& sequence) {
  int64_t longest = 0;
  for (const std::vector<int32_t>& stop : sequence.request->stop_sequences) {
    const auto size = static_cast<int64_t>(stop.size());
    if (size > longest && size <= sequence.num_generated() &&
        std::equal(stop.begin(), stop.end(), sequence.tokens.end() - size)) {
      longest = size;
    }
  }
  return longest;
}

// Returns whether the row is needed only to sample the token after it.
bool NeedsOnlyToken(const Sequence& sequence, int64_t position) {
  return position + 1 >= sequence.num_tokens() &&
         sequence.request->logits_output == LogitsOutput::kNone;
}

// Returns whether the log-probability of the prompt's next token is requested and not sent yet.
bool NeedsPromptToken(const Sequence& sequence, int64_t position) {
  return sequence.request->num_prompt_logprobs >= 0 && position + 1 < sequence.num_prompt &&
         position >= sequence.next_prompt_row;
}

// Returns the number of generated tokens up to a row.
int64_t NumGenerated(const Sequence& sequence, int64_t position) {
  return position + 1 - sequence.num_prompt;
}

bool IsPooled(const Sequence& sequence) { return sequence.request->pooling != Pooling::kNone; }

// Adds a final hidden state to the sequence's pooled vector. The last one ends the request. The sum
// has 64 bits and the order of the positions, so chunks of a prompt do not change it.
void PoolRow(Sequence& sequence, int64_t position, std::span<const float> hidden) {
  RequestOutput& output = sequence.output;
  if (sequence.request->pooling == Pooling::kLast) {
    output.pooled.assign(hidden.begin(), hidden.end());
  } else {
    std::vector<double>& sum = sequence.pooled_sum;
    sum.resize(hidden.size());
    std::transform(sum.begin(), sum.end(), hidden.begin(), sum.begin(), std::plus<double>());
    sequence.next_pooled_row = position + 1;
  }
  if (position + 1 < sequence.num_tokens()) {
    return;
  }
  for (const double value : sequence.pooled_sum) {
    output.pooled.push_back(static_cast<float>(value / static_cast<double>(position + 1)));
  }
  output.finish_reason = FinishReason::kLength;
}

TokenLogprobs PromptLogprobs(const Sequence& sequence, int64_t position, const float* logits,
                             int vocab_size) {
  return ComputeLogprobs(logits, vocab_size, sequence.tokens[static_cast<size_t>(position) + 1],
                         sequence.request->num_prompt_logprobs);
}

}  // namespace

bool OutputProcessor::IsComputed(const Row& row) {
  const std::vector<int32_t>& tokens = row.sequence->tokens;
  return row.position < row.sequence->num_tokens() &&
         tokens[static_cast<size_t>(row.position)] == row.token;
}

void Fail(Sequence& sequence, const std::exception& error) {
  RequestOutput& output = sequence.output;
  output.finish_reason = FinishReason::kError;
  output.error = error.what();
  if (const auto* fault = dynamic_cast<const InvalidArgument*>(&error)) {
    output.is_request_fault = true;
    output.error_field = fault->field();
  }
}

OutputProcessor::OutputProcessor(int vocab_size, int64_t max_sequence_len, int max_rows,
                                 Device& device)
    : vocab_size_(vocab_size),
      max_sequence_len_(max_sequence_len),
      device_(device),
      masks_(vocab_size) {
  for (int thread = 0; thread < device.num_host_threads(); ++thread) {
    samplers_.emplace_back(vocab_size);
  }
  rows_.reserve(static_cast<size_t>(max_rows));
  row_indices_.reserve(static_cast<size_t>(max_rows));
}

void OutputProcessor::Begin(const Batch& batch) {
  masks_.Begin(batch);
  CollectRows(batch);
}

void OutputProcessor::Run(Decoder& decoder) {
  const auto max_rows = static_cast<size_t>(decoder.max_logit_rows());
  for (size_t first = 0, end = 0; first < rows_.size(); first = end) {
    const bool pools = IsPooled(*rows_[first].sequence);
    while (end < rows_.size() && end - first < max_rows &&
           IsPooled(*rows_[end].sequence) == pools) {
      ++end;
    }
    if (pools) {
      RunPooling(first, end - first, decoder);
    } else {
      RunLogits(first, end - first, decoder);
    }
  }
  masks_.End();
}

void OutputProcessor::RunLogits(size_t first, size_t count, Decoder& decoder) {
  const std::span<Row> rows = std::span(rows_).subspan(first, count);
  decoder.ComputeLogits(static_cast<int>(first), static_cast<int>(count));
  ArgMaxOnDevice(rows, decoder);
  SampleOnDevice(rows, decoder);
  HandleRows(rows, ReadLogits(rows, decoder));
}

void OutputProcessor::RunPooling(size_t first, size_t count, Decoder& decoder) {
  const float* hidden = decoder.ReadHidden(static_cast<int>(first), static_cast<int>(count));
  for (const Row& row : std::span(rows_).subspan(first, count)) {
    if (!row.sequence->finished()) {
      try {
        PoolRow(*row.sequence, row.position, {hidden, static_cast<size_t>(decoder.hidden_size())});
      } catch (const std::exception& error) {  // memory is short
        Fail(*row.sequence, error);
      }
    }
    hidden += decoder.hidden_size();
  }
}

void OutputProcessor::CollectRows(const Batch& batch) {
  rows_.clear();
  row_indices_.clear();
  for (int i = 0; i < batch.num_seqs(); ++i) {
    Sequence& sequence = *batch.sequences[static_cast<size_t>(i)];
    const int64_t begin = sequence.num_computed;
    const int64_t end = begin + sequence.num_planned;
    for (int64_t p = FirstRow(sequence, begin, end); p < end; ++p) {
      const int32_t index =
          batch.cu_seqlens[static_cast<size_t>(i)] + static_cast<int32_t>(p - begin);
      rows_.push_back({&sequence, p, batch.tokens[static_cast<size_t>(index)]});
      row_indices_.push_back(index);
    }
  }
}

void OutputProcessor::ArgMaxOnDevice(std::span<Row> rows, Decoder& decoder) {
  const auto may_stay = [](const Row& row) {
    return NeedsOnlyToken(*row.sequence, row.position) &&
           IsPlainArgMax(*row.sequence->request, NumGenerated(*row.sequence, row.position));
  };
  chosen_.resize(rows.size());
  if (std::none_of(rows.begin(), rows.end(), may_stay) || !decoder.ArgMaxTokens(chosen_.data())) {
    return;
  }
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i].chosen = may_stay(rows[i]) ? chosen_[i] : -1;
  }
}

void OutputProcessor::SampleOnDevice(std::span<Row> rows, Decoder& decoder) {
  samplings_.clear();
  for (size_t i = 0; i < rows.size(); ++i) {
    const Sequence& sequence = *rows[i].sequence;
    if (!NeedsOnlyToken(sequence, rows[i].position)) {
      continue;
    }
    if (auto sampling =
            RowSamplingOf(*sequence.request, NumGenerated(sequence, rows[i].position))) {
      sampling->row = static_cast<int32_t>(i);
      samplings_.push_back(*sampling);
    }
  }
  chosen_.resize(rows.size());
  if (samplings_.empty() || !decoder.SampleTokens(samplings_, chosen_.data())) {
    return;
  }
  for (size_t i = 0; i < samplings_.size(); ++i) {
    rows[static_cast<size_t>(samplings_[i].row)].chosen = chosen_[i];
  }
}

// Copies logits to the host and fills read_rows_. Returns null if no row is needed.
float* OutputProcessor::ReadLogits(std::span<const Row> rows, Decoder& decoder) {
  read_rows_.clear();
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i].chosen < 0) {
      read_rows_.push_back(static_cast<int32_t>(i));
    }
  }
  return read_rows_.empty() ? nullptr : decoder.ReadLogits(read_rows_);
}

void OutputProcessor::HandleRows(std::span<Row> rows, float* logits) {
  ComputePromptLogprobs(rows, logits);
  runs_.clear();
  masked_runs_.clear();
  drafted_runs_.clear();
  for (size_t first = 0; first < rows.size();) {
    size_t end = first + 1;
    while (end < rows.size() && rows[end].sequence == rows[first].sequence) {
      ++end;
    }
    const SequenceRows run = {&rows[first], end - first, logits};
    const bool is_chosen = std::all_of(run.rows, run.rows + run.num_rows,
                                       [](const Row& row) { return row.chosen >= 0; });
    if (is_chosen) {
      HandleRun(run, samplers_.front());
    } else if (rows[first].sequence->request->token_mask != nullptr) {
      masked_runs_.push_back(run);
    } else {
      runs_.push_back(run);
    }
    for (; first < end; ++first) {
      logits += rows[first].chosen < 0 ? vocab_size_ : 0;
    }
  }
  HandleRuns(runs_);
  for (SequenceRows& run : masked_runs_) {
    SplitDraft(run);
    TakeMask(run);
  }
  HandleRuns(masked_runs_);
  std::ranges::for_each(drafted_runs_, [this](const SequenceRows& run) { HandleDraft(run); });
}

void OutputProcessor::ComputePromptLogprobs(std::span<Row> rows, const float* logits) {
  prompt_rows_.clear();
  for (Row& row : rows) {
    if (row.chosen >= 0) {
      continue;
    }
    if (NeedsPromptToken(*row.sequence, row.position)) {
      row.prompt_row = static_cast<int32_t>(prompt_rows_.size());
      prompt_rows_.emplace_back(&row, logits);
    }
    logits += vocab_size_;
  }
  prompt_logprobs_.assign(prompt_rows_.size(), std::nullopt);
  ForEach(static_cast<int64_t>(prompt_rows_.size()), [this](int64_t item, int) {
    const auto& [row, row_logits] = prompt_rows_[static_cast<size_t>(item)];
    try {
      prompt_logprobs_[static_cast<size_t>(item)] =
          PromptLogprobs(*row->sequence, row->position, row_logits, vocab_size_);
    } catch (const std::exception&) {
      // HandleRow retries, because it can end the request.
    }
  });
}

void OutputProcessor::ForEach(int64_t num_items, FunctionRef<void(int64_t item, int thread)> fn) {
  const int64_t num_logits = static_cast<int64_t>(read_rows_.size()) * vocab_size_;
  if (num_items > 1 && num_logits >= kMinParallelLogits) {
    device_.ForEachOnHost(num_items, fn);
    return;
  }
  for (int64_t item = 0; item < num_items; ++item) {
    fn(item, 0);
  }
}

void OutputProcessor::HandleRuns(std::span<const SequenceRows> runs) {
  ForEach(static_cast<int64_t>(runs.size()), [this, runs](int64_t item, int thread) {
    HandleRun(runs[static_cast<size_t>(item)], samplers_[static_cast<size_t>(thread)]);
  });
}

void OutputProcessor::SplitDraft(SequenceRows& run) {
  const int64_t num_known = run.rows->sequence->num_tokens();
  const auto known = static_cast<size_t>(
      std::clamp<int64_t>(num_known - run.rows->position, 0, static_cast<int64_t>(run.num_rows)));
  if (known < run.num_rows) {
    drafted_runs_.push_back({run.rows + known, run.num_rows - known,
                             run.logits + known * static_cast<size_t>(vocab_size_)});
    run.num_rows = known;
  }
}

void OutputProcessor::HandleDraft(const SequenceRows& run) {
  for (size_t i = 0; i < run.num_rows; ++i) {
    SequenceRows row = {&run.rows[i], 1, run.logits + i * static_cast<size_t>(vocab_size_)};
    if (!IsComputed(run.rows[i]) || run.rows[i].sequence->finished()) {
      return;
    }
    TakeMask(row);
    HandleRun(row, samplers_.front());
  }
}

void OutputProcessor::TakeMask(SequenceRows& run) {
  if (run.num_rows == 0) {
    return;
  }
  const Row& last = run.rows[run.num_rows - 1];
  Sequence& sequence = *last.sequence;
  if (last.position + 1 < sequence.num_tokens() || sequence.request->max_new_tokens == 0) {
    return;  // no token is sampled
  }
  try {
    const bool is_current = sequence.num_tokens_sent == sequence.num_generated();
    run.mask = is_current ? masks_.Wait(sequence) : masks_.Next(sequence);
  } catch (const std::exception& error) {
    Fail(sequence, error);
  }
}

void OutputProcessor::HandleRun(const SequenceRows& run, Sampler& sampler) {
  float* logits = run.logits;
  for (size_t i = 0; i < run.num_rows && !run.rows[i].sequence->finished(); ++i) {
    if (!IsComputed(run.rows[i])) {
      return;  // of a refused draft, like all rows after it
    }
    try {
      HandleRow(run.rows[i], logits, run.mask, sampler);
      logits += run.rows[i].chosen < 0 ? vocab_size_ : 0;
    } catch (const std::exception& error) {
      Fail(*run.rows[i].sequence, error);
    }
  }
}

void OutputProcessor::HandleRow(const Row& row, float* logits, std::span<const uint32_t> mask,
                                Sampler& sampler) {
  Sequence& sequence = *row.sequence;
  const Request& request = *sequence.request;
  const int64_t next = row.position + 1;
  if (row.prompt_row >= 0) {
    auto& known = prompt_logprobs_[static_cast<size_t>(row.prompt_row)];
    sequence.output.prompt_logprobs.push_back(
        known ? std::move(*known) : PromptLogprobs(sequence, row.position, logits, vocab_size_));
    sequence.next_prompt_row = next;
  }
  if (request.logits_output == LogitsOutput::kAll && row.position >= sequence.next_logits_row) {
    AppendLogits(sequence, logits);
    sequence.next_logits_row = next;
  }
  if (next < sequence.num_tokens()) {
    return;
  }
  if (request.max_new_tokens == 0) {
    sequence.output.finish_reason = FinishReason::kLength;
    return;
  }
  if (row.chosen >= 0) {
    AppendToken(sequence, row.chosen);
  } else {
    ChooseToken(sequence, logits, mask, sampler);
  }
}

void OutputProcessor::ChooseToken(Sequence& sequence, float* logits, std::span<const uint32_t> mask,
                                  Sampler& sampler) {
  const Request& request = *sequence.request;
  if (request.token_mask != nullptr && mask.empty()) {
    sequence.output.finish_reason = FinishReason::kStop;
    return;
  }
  if (request.logits_output == LogitsOutput::kGeneration) {
    AppendLogits(sequence, logits);
  }
  SampleResult result = sampler.Sample({.logits = logits,
                                        .request = &request,
                                        .tokens = sequence.tokens.data(),
                                        .num_tokens = sequence.num_tokens(),
                                        .num_generated = sequence.num_generated(),
                                        .token_mask = mask.data()});
  if (request.sampling.num_logprobs >= 0) {
    sequence.output.logprobs.push_back(std::move(result.logprobs));
  }
  AppendToken(sequence, result.token);
}

void OutputProcessor::AppendToken(Sequence& sequence, int32_t token) const {
  sequence.tokens.push_back(token);
  sequence.output.tokens.push_back(token);
  CheckStop(sequence);
}

void OutputProcessor::AppendLogits(Sequence& sequence, const float* logits) {
  sequence.output.logits.insert(sequence.output.logits.end(), logits, logits + vocab_size_);
  ++sequence.output.logits_rows;
}

void OutputProcessor::CheckStop(Sequence& sequence) const {
  const Request& request = *sequence.request;
  RequestOutput& output = sequence.output;
  const std::vector<int32_t>& eos = request.eos_ids;
  const bool is_eos =
      !request.ignore_eos && std::find(eos.begin(), eos.end(), sequence.tokens.back()) != eos.end();
  const int64_t stop = std::max<int64_t>(MatchedStop(sequence), is_eos ? 1 : 0);
  if (stop > 0) {
    output.finish_reason = FinishReason::kStop;
    output.stop_tokens = static_cast<int>(stop);
  } else if (sequence.num_generated() >= request.max_new_tokens ||
             sequence.num_tokens() >= max_sequence_len_) {
    output.finish_reason = FinishReason::kLength;
  }
}

}  // namespace turbomind
