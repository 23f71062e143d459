#pragma once

// ⑧ Which tokens the sequences of a step may choose, asked for while the device runs the step.

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

// A callback may wait for a lock for long (Python's): a thread of this class's own calls them, one
// after the other in the order of the batch, and the engine's waits only for an answer that is not
// there yet.
//
// Each Begin is followed by an End, or a Drop where the step has failed. What belongs to a request
// is held until then and no longer, so that a request that ends meanwhile may go. Engine thread
// only.
class TokenMasks {
 public:
  // Starts the thread. Throws std::system_error when the system gives none.
  explicit TokenMasks(int vocab_size);
  ~TokenMasks();
  TokenMasks(const TokenMasks&) = delete;
  TokenMasks& operator=(const TokenMasks&) = delete;

  // Begins to ask for each sequence with a mask that the planned batch brings to its next token,
  // and notes in num_tokens_sent what it is told. REQUIRES: Scheduler::StepDone was not called yet.
  void Begin(const Batch& batch);

  // The answer for a sequence: [ceil(vocab / 32)] words, valid until End; empty where generation
  // must stop. Waits for it. Throws what the callback threw (InvalidArgument as it is, others as
  // std::runtime_error) and InvalidArgument for a mask of another size. REQUIRES: it was asked for.
  std::span<const uint32_t> Wait(const Sequence& sequence);

  // Waits for the answers that nobody took.
  void End();
  // The same, without asking those that were not asked yet.
  void Drop();

 private:
  struct MaskRequest {
    const Sequence* sequence = nullptr;  // to be found by, never followed
    std::shared_ptr<Request> request;
    std::vector<int32_t> new_tokens;
    std::vector<uint32_t> mask;
    bool continues = false;
    std::exception_ptr error;
  };
  void Work();
  void Compute(MaskRequest& mask_request) const;
  void WaitFor(size_t num_ready);

  size_t num_words_;
  // Of the step the first num_mask_requests_, in the memory of those before; changed only while the
  // thread waits.
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
