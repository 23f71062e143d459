// The placement of matrices in GPU memory. Runs only without a GPU, because a driver counts memory
// in pages.

#include <doctest/doctest.h>

#include <memory>
#include <vector>

#include "turbomind/backend/cuda/linear/cuda_matrix.h"
#include "turbomind/core/check.h"

namespace turbomind::cuda {
namespace {

TEST_CASE("small matrices share a piece, which is released with the last of them") {
  constexpr size_t kPage = 1024;
  constexpr size_t kPiece = MatrixMemory::kPagesOfPiece * kPage;
  const auto free_bytes = [] { return GpuMemory().free_bytes; };
  const size_t all = free_bytes();
  MatrixMemory memory(kPiece);
  std::vector<std::shared_ptr<char>> parts;
  for (const size_t num_bytes : {size_t{700}, size_t{256}, size_t{1}, kPage + 1}) {
    parts.push_back(memory.Allocate(num_bytes));
  }
  CHECK(parts[1].get() == parts[0].get() + 768);
  CHECK(parts[2].get() == parts[1].get() + 256);
  CHECK(parts[3].get() == parts[2].get() + 256);
  CHECK(all - free_bytes() == kPiece);
  for (const size_t own : {kPage, 8 * kPage - 800, 8 * kPage + 1}) {
    const std::shared_ptr<char> apart = memory.Allocate(own);
    CHECK(all - free_bytes() == kPiece + own);
  }
  for (int i = 0; i < 7; ++i) {
    parts.push_back(memory.Allocate(4 * kPage + 256));  // a piece has room for six
  }
  CHECK(all - free_bytes() == 2 * kPiece);
  CHECK(reinterpret_cast<uintptr_t>(parts.back().get()) % 256 == 0);
  parts.erase(parts.begin() + 1, parts.end());
  CHECK(all - free_bytes() == 2 * kPiece);  // the newest piece is kept for more matrices
  parts.clear();
  CHECK(all - free_bytes() == kPiece);
}

TEST_CASE("a matrix gets its own memory if a piece does not fit") {
  MatrixMemory memory(2 * GpuMemory().total_bytes);
  CHECK(memory.Allocate(1000) != nullptr);
  CHECK_THROWS_AS(memory.Allocate(GpuMemory().total_bytes / 4 * 5), OutOfMemory);
}

}  // namespace
}  // namespace turbomind::cuda
