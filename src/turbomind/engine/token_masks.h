#pragma once

// ⑧ Gets the token masks of a step's sequences while the device runs the step.

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "turbomind/engine/batch.h"
#include "turbomind/engine/request.h"

namespace turbomind {

// A callback may wait for a lock for a long time (Python's). Therefore a separate thread makes the
// calls, one after another in batch order. The engine thread waits only for masks that are not
// ready.
//
// Each Begin is followed by End, or by Drop if the step failed. A request's data is held until then
// and no longer, so that a request that ends meanwhile can be destroyed. Only the engine thread may
// use it.
class TokenMasks {
 public:
  // Starts the thread. Throws std::system_error if it cannot be created.
  explicit TokenMasks(int vocab_size);
  ~TokenMasks();
  TokenMasks(const TokenMasks&) = delete;
  TokenMasks& operator=(const TokenMasks&) = delete;

  // Starts computing the masks of all sequences that get their next token from the planned batch.
  // Updates num_tokens_sent. REQUIRES: Scheduler::StepDone was not called yet.
  void Begin(const Batch& batch);

  // Waits for a sequence's mask and returns it: [ceil(vocab / 32)] words, valid until End; empty if
  // generation must stop. Rethrows InvalidArgument from the callback; other exceptions become
  // std::runtime_error. Throws InvalidArgument for a mask of the wrong size. REQUIRES: Begin
  // started the sequence's mask.
  std::span<const uint32_t> Wait(const Sequence& sequence);

  // Computes the mask after further tokens of this step and waits for it, like Wait.
  std::span<const uint32_t> Next(Sequence& sequence);

  // Waits for all remaining masks.
  void End();
  // Like End, but skips masks whose callback has not started yet.
  void Drop();

 private:
  struct MaskRequest {
    const Sequence* sequence = nullptr;  // used as a key, never dereferenced
    std::shared_ptr<Request> request;
    std::vector<int32_t> new_tokens;
    std::vector<uint32_t> mask;
    bool continues = false;
    std::exception_ptr error;
  };
  void Add(Sequence& sequence);
  void Start();
  void Work();
  void Compute(MaskRequest& mask_request) const;
  void WaitFor(size_t num_ready);

  size_t num_words_;
  // The first num_mask_requests_ belong to this step; the others keep memory for later steps.
  // Changed only while the thread waits.
  std::vector<MaskRequest> mask_requests_;
  size_t num_mask_requests_ = 0;
  std::mutex mutex_;
  std::condition_variable requested_;
  std::condition_variable ready_;
  size_t num_requested_ = 0;
  size_t num_begun_ = 0;
  size_t num_ready_ = 0;
  bool stops_ = false;
  std::thread thread_;
};

}  // namespace turbomind
