#include "turbomind/engine/token_masks.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "turbomind/core/check.h"

namespace turbomind {

TokenMasks::TokenMasks(int vocab_size)
    : num_words_(static_cast<size_t>(vocab_size + 31) / 32), thread_([this] { Work(); }) {}

TokenMasks::~TokenMasks() {
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
  }
  asked_.notify_one();
  thread_.join();
}

void TokenMasks::Begin(const Batch& batch) {
  Check(num_questions_ == 0, "the step before has ended");
  for (Sequence* sequence : batch.sequences) {
    const Request& request = *sequence->request;
    const bool chooses = sequence->num_computed + sequence->num_planned == sequence->num_tokens() &&
                         request.max_new_tokens > 0;
    if (request.token_mask == nullptr || !chooses) {
      continue;
    }
    if (num_questions_ == questions_.size()) {
      questions_.emplace_back();
    }
    Question& question = questions_[num_questions_++];
    question.sequence = sequence;
    question.request = sequence->request;
    question.new_tokens.assign(sequence->tokens.begin() + sequence->num_prompt + sequence->num_told,
                               sequence->tokens.end());
    sequence->num_told = sequence->num_generated();
  }
  if (num_questions_ == 0) {
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    num_asked_ = num_questions_;
  }
  asked_.notify_one();
}

std::span<const uint32_t> TokenMasks::Wait(const Sequence& sequence) {
  const auto end = questions_.begin() + static_cast<std::ptrdiff_t>(num_questions_);
  const auto found = std::ranges::find(questions_.begin(), end, &sequence, &Question::sequence);
  Check(found != end, "the sequence's mask was asked for");
  WaitFor(static_cast<size_t>(found - questions_.begin()) + 1);
  if (found->error != nullptr) {
    std::rethrow_exception(found->error);
  }
  return found->goes_on ? std::span<const uint32_t>(found->mask) : std::span<const uint32_t>();
}

void TokenMasks::Drop() {
  {
    const std::lock_guard lock(mutex_);
    num_asked_ = num_questions_ = num_begun_;
  }
  End();
}

void TokenMasks::End() {
  WaitFor(num_questions_);
  {
    const std::lock_guard lock(mutex_);
    num_asked_ = num_begun_ = num_answered_ = 0;
  }
  for (Question& question : questions_) {
    question.sequence = nullptr;
    question.request.reset();
    question.error = nullptr;
  }
  num_questions_ = 0;
}

void TokenMasks::WaitFor(size_t num_answered) {
  std::unique_lock lock(mutex_);
  answered_.wait(lock, [&] { return num_answered_ >= num_answered; });
}

void TokenMasks::Work() {
  std::unique_lock lock(mutex_);
  while (true) {
    asked_.wait(lock, [this] { return stops_ || num_begun_ < num_asked_; });
    if (stops_) {
      return;
    }
    Question& question = questions_[num_begun_++];
    lock.unlock();
    Ask(question);
    lock.lock();
    ++num_answered_;
    answered_.notify_one();
  }
}

void TokenMasks::Ask(Question& question) const {
  try {
    question.goes_on = false;
    question.mask.assign(num_words_, 0);
    question.goes_on = question.request->token_mask(question.new_tokens, question.mask);
    if (question.mask.size() != num_words_) {
      throw InvalidArgument("token_mask: got " + std::to_string(question.mask.size()) +
                            " words, want " + std::to_string(num_words_) + "; change the callback");
    }
  } catch (const InvalidArgument&) {
    question.error = std::current_exception();
  } catch (const std::exception& error) {
    question.error =
        std::make_exception_ptr(std::runtime_error(std::string("token_mask: ") + error.what()));
  } catch (...) {
    question.error = std::make_exception_ptr(std::runtime_error("token_mask: unknown error"));
  }
}

}  // namespace turbomind
