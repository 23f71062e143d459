#pragma once

// A step's arrays on the GPU. The scheduler writes them on the host; they are copied once, before
// the step's ops.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "turbomind/backend/cuda/runtime/pinned_buffer.h"
#include "turbomind/ops/params.h"
#include "turbomind/ops/recurrent_params.h"

namespace turbomind::cuda {

// Everything that determines the addresses of the arrays. Two steps of the same shape have every
// array at the same address as long as generation() does not change.
struct StepShape {
  int num_seqs = 0;
  int num_tokens = 0;
  std::vector<int64_t> table_strides = {};  // by group, powers of two
  std::vector<int> num_to_quantize = {};    // by group, 0 or powers of two
  std::vector<bool> has_window16 = {};      // by group
  bool has_states = false;

  bool operator==(const StepShape&) const = default;
};

class StepArrays {
 public:
  explicit StepArrays(Stream stream) : bytes_(stream) {}
  StepArrays(const StepArrays&) = delete;
  StepArrays& operator=(const StepArrays&) = delete;

  // Copy the arrays in the order of the stream. The caller may change them after the return. Waits
  // until the previous step's copy is done. Throws std::bad_alloc.
  void Upload(const StepParams& step);

  const StepShape& shape() const { return shape_; }
  int generation() const { return bytes_.generation(); }

  // Return the same batch with GPU addresses. Tables may have a larger stride, and the blocks to
  // quantize may be padded with entries without blocks (-1). REQUIRES: a batch of the last Upload.
  const BatchView& OnGpu(const BatchView& host) const;
  // Return the GPU address of the tokens, positions or rope_sets of the last Upload.
  const int32_t* OnGpu(const int32_t* host) const;
  // Return the states of the last Upload with GPU addresses.
  StateBatch OnGpu(const StateBatch& host) const;
  // Return all blocks to quantize of a group, including the padding.
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
  Pair rope_sets_;  // null if the step has none
  const int32_t* host_slots_ = nullptr;
  StateBatch states_;
};

}  // namespace turbomind::cuda
