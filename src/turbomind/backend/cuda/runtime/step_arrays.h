#pragma once

// A step's arrays on the GPU: what the scheduler wrote on the host, copied once before the ops.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "turbomind/backend/cuda/runtime/pinned_buffer.h"
#include "turbomind/ops/params.h"

namespace turbomind::cuda {

// What decides where each array lies: two steps of one shape have every array at the same address,
// as long as generation() is the same.
struct StepShape {
  int num_seqs = 0;
  int num_tokens = 0;
  std::vector<int64_t> table_strides = {};  // by group, powers of two
  std::vector<int> num_to_quantize = {};    // by group, 0 or powers of two
  std::vector<bool> has_window16 = {};      // by group

  bool operator==(const StepShape&) const = default;
};

class StepArrays {
 public:
  explicit StepArrays(Stream stream) : bytes_(stream) {}
  StepArrays(const StepArrays&) = delete;
  StepArrays& operator=(const StepArrays&) = delete;

  // Copies the arrays in the order of the stream; they may change when it returns. Waits until the
  // last step's have been copied. Throws std::bad_alloc.
  void Upload(const StepParams& step);

  const StepShape& shape() const { return shape_; }
  int generation() const { return bytes_.generation(); }

  // The same batch with addresses on the GPU; tables may have a larger stride, and moves without
  // blocks (-1) may follow. REQUIRES: a batch of the last Upload.
  const BatchView& OnGpu(const BatchView& host) const;
  // Tokens or positions of the last Upload.
  const int32_t* OnGpu(const int32_t* host) const;
  // All of a group's, those without blocks included.
  std::span<const PendingQuantization> OnGpu(const PendingQuantization* host) const;

 private:
  struct Pair {
    const void* host = nullptr;
    const void* gpu = nullptr;
  };

  void Measure(const StepParams& step);
  template <class T>
  const T* Place(const T* host, int64_t size);
  const int32_t* PlaceTable(const int32_t* host, const BatchView& batch, int64_t stride);
  const PendingQuantization* PlacePending(const BatchView& batch, int num_to_quantize);

  MirroredBytes bytes_;
  size_t used_ = 0;
  StepShape shape_;
  std::vector<BatchView> host_;  // by group
  std::vector<BatchView> views_;
  Pair tokens_;
  Pair positions_;
};

}  // namespace turbomind::cuda
