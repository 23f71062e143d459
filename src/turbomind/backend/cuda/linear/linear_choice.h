#pragma once

// ⑥ Which kernel computes a linear layer: the table in the source, the candidates of the tuner, and
// its choices, which replace the table. Host arithmetic only.

#include <array>
#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "turbomind/backend/cuda/linear/matrix_layout.h"
#include "turbomind/ops/params.h"

namespace turbomind::cuda {

// All but kFused, kWide and kLibrary return the same bits.
enum class LinearKernel : uint8_t {
  kStream1,  // StreamKernel with one tile of outputs per block; for up to 8 rows
  kStream2,  // the same with two tiles
  kFused,    // StreamKernel with the norm before it and the activation after it, in one launch
  kTile,     // TileKernel
  kWide,     // WideKernel: products of warp groups, after rounding weights with scales to BF16
  kLibrary   // cuBLASLt, after expanding weights with scales or with 8-bit activations
};
const char* NameOf(LinearKernel kernel);

// The matrices that one launch multiplies. They have one format and one number of columns. A norm
// before them and an activation after them belong to the stack: their time counts.
struct LinearStack {
  MatrixFormat stored = MatrixFormat::kF32;
  int64_t cols = 0;
  int num_experts = 0;                             // 0: the matrices are stacked along the outputs
  std::array<int64_t, kMaxSegments> outputs = {};  // of each matrix, or of one expert
  bool normed = false;
  bool gated = false;  // of two equal matrices, or of experts whose outputs alternate

  int64_t total_outputs() const;
  int64_t num_bytes() const;  // of all experts
  // E.g. "norm, bf16 4096+1024+1024 x 4096", "32 experts of mxfp4 5760 x 2880, gate".
  std::string name() const;
  auto operator<=>(const LinearStack&) const = default;
};

// Return how many of the parts, from the first one, form a stack. REQUIRES: there is a part.
size_t CountStacked(std::span<const LinearPart> parts);
LinearStack StackOf(std::span<const LinearPart> parts);
// Return the stack of a call with a norm, with the activation of gates, or with neither. Nothing if
// the parts form several stacks, or are not a gate and its up matrix.
std::optional<LinearStack> StackOfCall(std::span<const LinearPart> parts, bool normed, bool gated);
LinearStack StackOfExperts(std::span<const LinearPart> experts);
// Return the number of rows of x per matrix; for experts, the average.
int64_t RowsOfMatrix(int64_t num_rows, int num_experts);

// What else the table depends on.
struct LinearMachine {
  int sm = 0;                    // compute capability, e.g. 90
  bool has_library = false;      // false if calls must be deterministic
  bool has_warp_groups = false;  // likewise
  bool fp8_activations = false;
};

// The table in the source. `num_rows` are those of all experts.
LinearKernel TableKernel(const LinearStack& stack, int64_t num_rows, const LinearMachine& machine);

// Return whether a block of StreamKernel has two tiles, by the table.
bool StreamHasTwoTiles(const LinearStack& stack, int64_t num_rows);

// Return whether the library multiplies FP8 with 8-bit activations, whose scales are those of rows
// or of 128 columns.
bool LibraryMultipliesFp8(const LinearMachine& machine);
// Return whether the library is faster than TileKernel, by the table, if weights must be expanded.
bool ExpandingIsFaster(int64_t num_rows, int sm);

// A choice of the tuner is for a range of rows. It is measured with the most rows of the range:
// every kernel reads and multiplies whole tiles of rows.
inline constexpr std::array<int, 14> kRowBuckets = {1,   2,   4,   8,    16,   32,   64,
                                                    128, 256, 512, 1024, 2048, 4096, 8192};
// The rows of all experts count, so these layers have all buckets, and more rows have none. Other
// layers have the buckets up to 1024, which includes all larger numbers of rows.
int NumRowBuckets(const LinearStack& stack);
inline constexpr int kNoBucket = -1;
int RowBucketOf(const LinearStack& stack, int64_t num_rows);

// Rows of a call with kFused and a norm, whose sum of squares every block computes.
inline constexpr int kMaxFusedNormRows = 8;

// Return the kernels that may be the fastest for a bucket, the table's first.
std::vector<LinearKernel> CandidatesOf(const LinearStack& stack, int bucket,
                                       const LinearMachine& machine);

// The choices of the tuner.
class LinearChoices {
 public:
  // REQUIRES: CandidatesOf(stack, bucket, machine) has the kernel.
  void Set(const LinearStack& stack, int bucket, LinearKernel kernel);
  void Clear(const LinearStack& stack, int bucket);  // the table's choice is valid again
  LinearKernel Find(const LinearStack& stack, int64_t num_rows, const LinearMachine& machine) const;

 private:
  static constexpr int8_t kNone = -1;
  std::map<LinearStack, std::array<int8_t, kRowBuckets.size()>> kernels_;
};

// Return the number of slices of the columns that are summed separately. It is large enough for a
// GPU to stay busy with few rows of a matrix of this shape. The sums depend on it, so it is the
// same for every kernel, and no tuner changes it.
int NumSlices(MatrixFormat stored, int64_t outputs, int64_t cols);

}  // namespace turbomind::cuda
