#include "turbomind/backend/cuda/linear/linear_choice.h"

#include <algorithm>
#include <numeric>

#include "turbomind/core/ceil_div.h"
#include "turbomind/core/check.h"

namespace turbomind::cuda {
namespace {

// Number of warps for one row tile that fill a large GPU (132 SMs with 32 to 48 warps each).
constexpr int64_t kWantedWarps = 6144;
constexpr int kMinUnits = 5;  // per slice; a shorter slice ends before its first loads arrive

// The table. Numbers without a measurement are predictions, which the tuner checks on each GPU.

// Number of tiles from which on blocks of two tiles still give every SM a block. Two tiles share
// the reads of x and the work of a warp on a unit beside the weights. With one row, only K-quants
// need that: on SM 90, kQ4_K takes 212 instructions for a unit of one tile and 160 for each of two,
// and its 592 bytes as long as about 180.
constexpr int64_t kWantedTiles = 264;
constexpr int kMinRowsOfTwoTiles = 3;
constexpr int kMaxStreamRows = 16;
// The library multiplies BF16 matrices faster from this number of rows on. With large matrices it
// is faster for every number of rows. On an H100 with one row, 28,672 x 4,096 weights take 81 µs
// instead of 137, and 4,096 x 4,096 weights take 16.5 µs instead of 17.5, to which the library must
// add the rounding of x.
constexpr int kMinLibraryRows = 65;
constexpr int64_t kMinLibraryWeights = int64_t{1} << 25;
// Weights with scales cost the library 4.5 bytes of traffic each. On GPUs with warp-group
// instructions (wgmma, tcgen05), which are about twice as fast as mma, that pays off from 400 rows
// on. On other GPUs the library uses mma as well and only has the better schedule.
constexpr int kMinExpandedRows = 512;
constexpr int kMinExpandedRowsMma = 2048;
// With 8-bit activations, the library reads FP8 as it is and multiplies twice as fast.
constexpr int kMinFp8Rows = 64;

// The candidates. Up to kMaxStreamCandidateRows rows per matrix, StreamKernel reads the weights
// twice at most, the second time from the L2 cache. TileKernel computes tiles of 32 rows, and one
// of fewer than kMinTileRows rows would compute more than four times as much as needed. WideKernel
// does the same, but ends with all of its blocks at the same time, which counts for experts.
// Expanding costs as many bytes as reading the weights for kMinExpandedCandidateRows rows or more.
constexpr int kMaxStreamCandidateRows = 32;
constexpr int kMinTileRows = 8;
constexpr int kMinWideRows = 16;
constexpr int kMinExpandedCandidateRows = 128;

constexpr int kPlainBuckets = 11;
static_assert(kRowBuckets[kPlainBuckets - 1] == 1024);

bool LibraryIsFaster(const LinearStack& stack, int64_t num_rows, const LinearMachine& machine) {
  if (stack.stored == MatrixFormat::kBF16) {
    return num_rows >= kMinLibraryRows ||
           std::all_of(stack.outputs.begin(), stack.outputs.end(), [&](int64_t outputs) {
             return outputs == 0 || outputs * stack.cols >= kMinLibraryWeights;
           });
  }
  if (IsFp8(stack.stored) && LibraryMultipliesFp8(machine)) {
    return num_rows >= kMinFp8Rows;
  }
  return ExpandingIsFaster(num_rows, machine.sm);
}

}  // namespace

bool StreamHasTwoTiles(const LinearStack& stack, int64_t num_rows) {
  const int64_t outputs = stack.total_outputs();
  const int64_t tiles = NumTiles(outputs);
  const bool is_full = tiles * NumSlices(stack.stored, outputs, stack.cols) >= kWantedWarps;
  const int min_rows = IsKQuant(stack.stored) ? 1 : kMinRowsOfTwoTiles;
  return num_rows > 8 || is_full || (num_rows >= min_rows && tiles >= kWantedTiles);
}

bool LibraryMultipliesFp8(const LinearMachine& machine) {
  return machine.fp8_activations && machine.sm / 10 == 9;  // others lack these scales
}

bool ExpandingIsFaster(int64_t num_rows, int sm) {
  const bool has_warp_groups = sm / 10 == 9 || sm / 10 == 10;
  return num_rows >= (has_warp_groups ? kMinExpandedRows : kMinExpandedRowsMma);
}

const char* NameOf(LinearKernel kernel) {
  switch (kernel) {
    case LinearKernel::kStream1:
      return "stream1";
    case LinearKernel::kStream2:
      return "stream2";
    case LinearKernel::kFused:
      return "fused";
    case LinearKernel::kTile:
      return "tile";
    case LinearKernel::kWide:
      return "wide";
    case LinearKernel::kLibrary:
      return "library";
  }
  throw InternalError("a linear layer must have a kernel");
}

int64_t LinearStack::total_outputs() const {
  return std::accumulate(outputs.begin(), outputs.end(), int64_t{0});
}

int64_t LinearStack::num_bytes() const {
  int64_t total = 0;
  for (const int64_t one : outputs) {
    total += NumTiles(one) * TileBytes(stored, cols);
  }
  return total * std::max(num_experts, 1);
}

std::string LinearStack::name() const {
  std::string text = normed ? "norm, " : "";
  text += num_experts > 0 ? std::to_string(num_experts) + " experts of " : "";
  text += std::string(InfoOf(stored).name) + " " + std::to_string(outputs[0]);
  for (size_t i = 1; i < outputs.size() && outputs[i] > 0; ++i) {
    text += "+" + std::to_string(outputs[i]);
  }
  return text + " x " + std::to_string(cols) + (gated ? ", gate" : "");
}

size_t CountStacked(std::span<const LinearPart> parts) {
  size_t count = 1;
  while (count < parts.size() && count < kMaxSegments &&
         parts[count].weight->format == parts[0].weight->format) {
    ++count;
  }
  return count;
}

LinearStack StackOf(std::span<const LinearPart> parts) {
  LinearStack stack = {.stored = StoredFormat(parts[0].weight->format),
                       .cols = parts[0].weight->cols};
  Check(parts.size() <= stack.outputs.size(), "a stack must have at most kMaxSegments parts");
  for (size_t i = 0; i < parts.size(); ++i) {
    stack.outputs[i] = parts[i].weight->rows;
  }
  return stack;
}

std::optional<LinearStack> StackOfCall(std::span<const LinearPart> parts, bool normed, bool gated) {
  if (CountStacked(parts) != parts.size()) {
    return std::nullopt;
  }
  LinearStack stack = StackOf(parts);
  stack.normed = normed;
  stack.gated = gated;
  const bool is_pair = parts.size() == 2 && stack.outputs[0] == stack.outputs[1];
  return gated && !is_pair ? std::nullopt : std::optional(stack);
}

LinearStack StackOfExperts(std::span<const LinearPart> experts) {
  LinearStack stack = StackOf(experts.first(1));
  stack.num_experts = static_cast<int>(experts.size());
  return stack;
}

int64_t RowsOfMatrix(int64_t num_rows, int num_experts) {
  return num_experts > 0 ? CeilDiv(num_rows, int64_t{num_experts}) : num_rows;
}

LinearKernel TableKernel(const LinearStack& stack, int64_t num_rows, const LinearMachine& machine) {
  if (machine.has_library && stack.num_experts == 0 && LibraryIsFaster(stack, num_rows, machine)) {
    return LinearKernel::kLibrary;
  }
  if (RowsOfMatrix(num_rows, stack.num_experts) > kMaxStreamRows) {
    return LinearKernel::kTile;
  }
  return StreamHasTwoTiles(stack, num_rows) ? LinearKernel::kStream2 : LinearKernel::kStream1;
}

int NumRowBuckets(const LinearStack& stack) {
  return stack.num_experts > 0 ? static_cast<int>(kRowBuckets.size()) : kPlainBuckets;
}

int RowBucketOf(const LinearStack& stack, int64_t num_rows) {
  const auto end = kRowBuckets.begin() + NumRowBuckets(stack);
  const auto bucket = std::lower_bound(kRowBuckets.begin(), end, num_rows);
  if (bucket == end) {
    return stack.num_experts > 0 ? kNoBucket : kPlainBuckets - 1;
  }
  return static_cast<int>(bucket - kRowBuckets.begin());
}

std::vector<LinearKernel> CandidatesOf(const LinearStack& stack, int bucket,
                                       const LinearMachine& machine) {
  const int num_rows = kRowBuckets[static_cast<size_t>(bucket)];
  const int64_t rows_of_matrix = RowsOfMatrix(num_rows, stack.num_experts);
  std::vector<LinearKernel> kernels = {TableKernel(stack, num_rows, machine)};
  const bool fuses_norm = stack.normed && num_rows <= kMaxFusedNormRows;
  if (stack.stored == MatrixFormat::kF32) {  // one kernel, whatever the table says
    if (fuses_norm && !stack.gated) {
      kernels.push_back(LinearKernel::kFused);
    }
    return kernels;
  }
  const auto add = [&](LinearKernel kernel, bool may_win) {
    if (may_win && kernel != kernels[0]) {
      kernels.push_back(kernel);
    }
  };
  add(LinearKernel::kStream1, num_rows <= 8);
  add(LinearKernel::kStream2, rows_of_matrix <= kMaxStreamCandidateRows);
  add(LinearKernel::kFused,
      fuses_norm || (stack.gated && !stack.normed && rows_of_matrix <= kMaxStreamCandidateRows));
  add(LinearKernel::kTile, rows_of_matrix >= kMinTileRows);
  add(LinearKernel::kWide,
      machine.has_warp_groups && (stack.num_experts > 0 || num_rows >= kMinWideRows));
  add(LinearKernel::kLibrary,
      machine.has_library && stack.num_experts == 0 &&
          (stack.stored == MatrixFormat::kBF16 || num_rows >= kMinExpandedCandidateRows));
  return kernels;
}

void LinearChoices::Set(const LinearStack& stack, int bucket, LinearKernel kernel) {
  const auto [row, is_new] = kernels_.try_emplace(stack);
  if (is_new) {
    row->second.fill(kNone);
  }
  row->second[static_cast<size_t>(bucket)] = static_cast<int8_t>(kernel);
}

void LinearChoices::Clear(const LinearStack& stack, int bucket) {
  if (const auto row = kernels_.find(stack); row != kernels_.end()) {
    row->second[static_cast<size_t>(bucket)] = kNone;
  }
}

LinearKernel LinearChoices::Find(const LinearStack& stack, int64_t num_rows,
                                 const LinearMachine& machine) const {
  const auto row = kernels_.find(stack);
  const int bucket = row == kernels_.end() ? kNoBucket : RowBucketOf(stack, num_rows);
  const int8_t kernel = bucket == kNoBucket ? kNone : row->second[static_cast<size_t>(bucket)];
  return kernel == kNone ? TableKernel(stack, num_rows, machine)
                         : static_cast<LinearKernel>(kernel);
}

int NumSlices(MatrixFormat stored, int64_t outputs, int64_t cols) {
  const int64_t tiles = std::max<int64_t>(NumTiles(outputs), 1);
  const int64_t max_slices = std::min(
      {int64_t{kMaxSlices}, kWantedWarps / tiles, int64_t{NumUnits(stored, cols)} / kMinUnits});
  int slices = 1;
  while (2 * slices <= max_slices) {
    slices *= 2;
  }
  return slices;
}

}  // namespace turbomind::cuda
