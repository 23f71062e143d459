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
  requested_.notify_one();
  thread_.join();
}

void TokenMasks::Begin(const Batch& batch) {
  Check(num_mask_requests_ == 0, "the previous step must have ended");
  for (Sequence* sequence : batch.sequences) {
    const Request& request = *sequence->request;
    const bool chooses = sequence->num_computed + sequence->num_planned >= sequence->num_tokens() &&
                         request.max_new_tokens > 0;
    if (request.token_mask == nullptr || !chooses) {
      continue;
    }
    Add(*sequence);
  }
  if (num_mask_requests_ > 0) {
    Start();
  }
}

void TokenMasks::Add(Sequence& sequence) {
  if (num_mask_requests_ == mask_requests_.size()) {
    mask_requests_.emplace_back();
  }
  MaskRequest& mask_request = mask_requests_[num_mask_requests_++];
  mask_request.sequence = &sequence;
  mask_request.request = sequence.request;
  mask_request.new_tokens.assign(
      sequence.tokens.begin() + sequence.num_prompt + sequence.num_tokens_sent,
      sequence.tokens.end());
  sequence.num_tokens_sent = sequence.num_generated();
}

void TokenMasks::Start() {
  {
    const std::lock_guard lock(mutex_);
    num_requested_ = num_mask_requests_;
  }
  requested_.notify_one();
}

std::span<const uint32_t> TokenMasks::Next(Sequence& sequence) {
  WaitFor(num_mask_requests_);  // so that the thread waits
  Add(sequence);
  Start();
  return Wait(sequence);
}

std::span<const uint32_t> TokenMasks::Wait(const Sequence& sequence) {
  const auto begin = mask_requests_.rend() - static_cast<std::ptrdiff_t>(num_mask_requests_);
  const auto newest =
      std::ranges::find(begin, mask_requests_.rend(), &sequence, &MaskRequest::sequence);
  Check(newest != mask_requests_.rend(), "Begin must have started the sequence's mask");
  const auto found = std::prev(newest.base());
  WaitFor(static_cast<size_t>(found - mask_requests_.begin()) + 1);
  if (found->error != nullptr) {
    std::rethrow_exception(found->error);
  }
  return found->continues ? std::span<const uint32_t>(found->mask) : std::span<const uint32_t>();
}

void TokenMasks::Drop() {
  {
    const std::lock_guard lock(mutex_);
    num_requested_ = num_mask_requests_ = num_begun_;
  }
  End();
}

void TokenMasks::End() {
  WaitFor(num_mask_requests_);
  {
    const std::lock_guard lock(mutex_);
    num_requested_ = num_begun_ = num_ready_ = 0;
  }
  for (MaskRequest& mask_request : mask_requests_) {
    mask_request.sequence = nullptr;
    mask_request.request.reset();
    mask_request.error = nullptr;
  }
  num_mask_requests_ = 0;
}

void TokenMasks::WaitFor(size_t num_ready) {
  std::unique_lock lock(mutex_);
  ready_.wait(lock, [&] { return num_ready_ >= num_ready; });
}

void TokenMasks::Work() {
  std::unique_lock lock(mutex_);
  while (true) {
    requested_.wait(lock, [this] { return stops_ || num_begun_ < num_requested_; });
    if (stops_) {
      return;
    }
    MaskRequest& mask_request = mask_requests_[num_begun_++];
    lock.unlock();
    Compute(mask_request);
    lock.lock();
    ++num_ready_;
    ready_.notify_one();
  }
}

void TokenMasks::Compute(MaskRequest& mask_request) const {
  try {
    mask_request.continues = false;
    mask_request.mask.assign(num_words_, 0);
    mask_request.continues =
        mask_request.request->token_mask(mask_request.new_tokens, mask_request.mask);
    if (mask_request.mask.size() != num_words_) {
      throw InvalidArgument("token_mask", "returned " + std::to_string(mask_request.mask.size()) +
                                              " words, but must return " +
                                              std::to_string(num_words_) +
                                              ". Change the callback.");
    }
  } catch (const InvalidArgument&) {
    mask_request.error = std::current_exception();
  } catch (const std::exception& error) {
    mask_request.error =
        std::make_exception_ptr(std::runtime_error(std::string("token_mask: ") + error.what()));
  } catch (...) {
    mask_request.error = std::make_exception_ptr(std::runtime_error("token_mask: unknown error"));
  }
}

}  // namespace turbomind
