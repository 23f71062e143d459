#include <algorithm>
#include <bit>
#include <cstring>

#include "turbomind/backend/cuda/runtime/step_arrays.h"
#include "turbomind/core/check.h"

namespace turbomind::cuda {
namespace {

constexpr size_t kAlignment = 256;
constexpr int64_t kMinStride = 8;
constexpr unsigned kMinToQuantize = 4;

size_t Aligned(size_t num_bytes) { return (num_bytes + kAlignment - 1) / kAlignment * kAlignment; }

template <class T>
size_t BytesOf(int64_t size) {
  return Aligned(static_cast<size_t>(size) * sizeof(T));
}

int64_t TableStride(const BatchView& batch) {
  const auto min_stride = static_cast<uint64_t>(std::max(batch.block_table_stride, kMinStride));
  return static_cast<int64_t>(std::bit_ceil(min_stride));
}

// Round up to few distinct numbers, so that more steps can replay the same graph.
int PaddedToQuantize(int num_to_quantize) {
  const auto needed = std::max(static_cast<unsigned>(num_to_quantize), kMinToQuantize);
  return num_to_quantize == 0 ? 0 : static_cast<int>(std::bit_ceil(needed));
}

}  // namespace

// Fill shape_ and reserve the bytes.
void StepArrays::Measure(const StepParams& step) {
  const BatchView& first = step.groups[0].batch;
  shape_.num_seqs = first.num_seqs;
  shape_.num_tokens = first.num_tokens;
  shape_.table_strides.clear();
  shape_.num_to_quantize.clear();
  shape_.has_window16.clear();
  size_t num_bytes =
      3 * BytesOf<int32_t>(first.num_tokens) + 2 * BytesOf<int32_t>(int64_t{first.num_seqs} + 1);
  shape_.has_states = step.states != nullptr;
  if (step.states != nullptr) {
    num_bytes +=
        BytesOf<int32_t>(first.num_seqs) + BytesOf<StateSave>(int64_t{step.states->num_saves});
  }
  for (int i = 0; i < step.num_groups; ++i) {
    const BatchView& batch = step.groups[i].batch;
    const int64_t stride = TableStride(batch);
    const bool has_window16 = batch.window16_tables != nullptr;
    shape_.table_strides.push_back(stride);
    const int num_to_quantize = PaddedToQuantize(batch.num_to_quantize);
    shape_.num_to_quantize.push_back(num_to_quantize);
    shape_.has_window16.push_back(has_window16);
    num_bytes += (has_window16 ? 2 : 1) * BytesOf<int32_t>(batch.num_seqs * stride) +
                 BytesOf<PendingQuantization>(num_to_quantize);
  }
  bytes_.Reserve(num_bytes);
}

template <class T>
const T* StepArrays::Place(const T* host, int64_t size) {
  const size_t begin = used_;
  used_ += BytesOf<T>(size);
  Check(used_ <= bytes_.capacity(), "the reserved bytes must hold the arrays of the step");
  if (size > 0) {
    std::memcpy(bytes_.host() + begin, host, static_cast<size_t>(size) * sizeof(T));
  }
  return reinterpret_cast<const T*>(bytes_.gpu() + begin);
}

const int32_t* StepArrays::PlaceTable(const int32_t* host, const BatchView& batch, int64_t stride) {
  const size_t begin = used_;
  used_ += BytesOf<int32_t>(batch.num_seqs * stride);
  Check(used_ <= bytes_.capacity(), "the reserved bytes must hold the arrays of the step");
  auto* to = reinterpret_cast<int32_t*>(bytes_.host() + begin);
  for (int i = 0; i < batch.num_seqs; ++i) {
    int32_t* row = to + i * stride;
    std::copy_n(host + i * batch.block_table_stride, batch.block_table_stride, row);
    std::fill(row + batch.block_table_stride, row + stride, -1);
  }
  return reinterpret_cast<const int32_t*>(bytes_.gpu() + begin);
}

const PendingQuantization* StepArrays::PlacePending(const BatchView& batch, int num_to_quantize) {
  const size_t begin = used_;
  used_ += BytesOf<PendingQuantization>(num_to_quantize);
  Check(used_ <= bytes_.capacity(), "the reserved bytes must hold the arrays of the step");
  auto* to = reinterpret_cast<PendingQuantization*>(bytes_.host() + begin);
  std::fill(std::copy_n(batch.blocks_to_quantize, batch.num_to_quantize, to), to + num_to_quantize,
            PendingQuantization{});
  return reinterpret_cast<const PendingQuantization*>(bytes_.gpu() + begin);
}

void StepArrays::Upload(const StepParams& step) {
  Check(step.num_groups > 0, "a step must have at least one group of layers");
  Measure(step);
  used_ = 0;
  const BatchView& first = step.groups[0].batch;
  tokens_ = {step.tokens, Place(step.tokens, first.num_tokens)};
  positions_ = {first.positions, Place(first.positions, first.num_tokens)};
  rope_sets_ = {};
  if (first.rope_sets != nullptr) {
    rope_sets_ = {first.rope_sets, Place(first.rope_sets, first.num_tokens)};
  }
  host_slots_ = nullptr;
  states_ = {};
  if (step.states != nullptr) {
    host_slots_ = step.states->slots;
    states_ = {Place(step.states->slots, first.num_seqs),
               Place(step.states->saves, step.states->num_saves), step.states->num_saves};
  }
  const int32_t* cu_seqlens = Place(first.cu_seqlens, int64_t{first.num_seqs} + 1);
  const int32_t* context_lens = Place(first.context_lens, first.num_seqs);
  host_.clear();
  views_.clear();
  for (int i = 0; i < step.num_groups; ++i) {
    const BatchView& batch = step.groups[i].batch;
    const int64_t stride = shape_.table_strides[static_cast<size_t>(i)];
    BatchView view = batch;
    view.cu_seqlens = cu_seqlens;
    view.context_lens = context_lens;
    view.positions = static_cast<const int32_t*>(positions_.gpu);
    view.block_tables = PlaceTable(batch.block_tables, batch, stride);
    view.block_table_stride = stride;
    if (batch.window16_tables != nullptr) {
      view.window16_tables = PlaceTable(batch.window16_tables, batch, stride);
    }
    view.num_to_quantize = shape_.num_to_quantize[static_cast<size_t>(i)];
    view.blocks_to_quantize = PlacePending(batch, view.num_to_quantize);
    host_.push_back(batch);
    views_.push_back(view);
  }
  bytes_.Upload(used_);
}

const BatchView& StepArrays::OnGpu(const BatchView& host) const {
  for (size_t i = 0; i < host_.size(); ++i) {
    if (host_[i].block_tables == host.block_tables && host_[i].num_tokens == host.num_tokens) {
      return views_[i];
    }
  }
  FailCheck("the batch must belong to the uploaded step", std::source_location::current());
}

const int32_t* StepArrays::OnGpu(const int32_t* host) const {
  for (const Pair& pair : {tokens_, positions_, rope_sets_}) {
    if (pair.host == host) {
      return static_cast<const int32_t*>(pair.gpu);
    }
  }
  FailCheck("the array must belong to the uploaded step", std::source_location::current());
}

StateBatch StepArrays::OnGpu(const StateBatch& host) const {
  Check(host_slots_ != nullptr && host.slots == host_slots_ && host.num_saves == states_.num_saves,
        "the states must belong to the uploaded step");
  return states_;
}

std::span<const PendingQuantization> StepArrays::OnGpu(const PendingQuantization* host) const {
  for (size_t i = 0; i < host_.size(); ++i) {
    if (host_[i].num_to_quantize > 0 && host_[i].blocks_to_quantize == host) {
      return {views_[i].blocks_to_quantize, static_cast<size_t>(views_[i].num_to_quantize)};
    }
  }
  FailCheck("the blocks to quantize must belong to the uploaded step",
            std::source_location::current());
}

}  // namespace turbomind::cuda
