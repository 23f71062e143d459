// The fastest loops that tile registers allow: products of what four of them hold.

#include <cstdint>

#include "turbomind/backend/cpu/ceiling_kernels.h"
#include "turbomind/backend/cpu/isa/amx/tiles.h"

namespace turbomind::amx {
namespace {

constexpr int64_t kBytes = 1024;  // of a register
static_assert(kCeilingOperandBytes == 4 * kBytes);

// Four registers of sums, each a product of 16 rows by 16 columns in a round.
template <class Sum, class Dots>
float Multiply(const uint8_t* operands, int64_t rounds, Dots dots) {
  TileShape shape;
  for (int i = 0; i < 8; ++i) {
    shape.Set(i, 16, 64);
  }
  const TileConfig config(shape);
  LoadTile<4>(operands, 64);
  LoadTile<5>(operands + kBytes, 64);
  LoadTile<6>(operands + 2 * kBytes, 64);
  LoadTile<7>(operands + 3 * kBytes, 64);
  for (int64_t round = 0; round < rounds; ++round) {
    dots();
  }
  alignas(64) Sum sums[4][kBytes / sizeof(Sum)];
  StoreTile<0>(sums[0], 64);
  StoreTile<1>(sums[1], 64);
  StoreTile<2>(sums[2], 64);
  StoreTile<3>(sums[3], 64);
  float total = 0.f;
  for (const auto& tile : sums) {
    for (const Sum sum : tile) {
      total += static_cast<float>(sum);
    }
  }
  return total;
}

float MultiplyInt8(const uint8_t* operands, int64_t rounds) {
  return Multiply<int32_t>(operands, rounds, [] {
    DotBytes<0, 4, 6>();
    DotBytes<1, 4, 7>();
    DotBytes<2, 5, 6>();
    DotBytes<3, 5, 7>();
  });
}

float MultiplyBf16(const uint8_t* operands, int64_t rounds) {
  return Multiply<float>(operands, rounds, [] {
    DotBf16<0, 4, 6>();
    DotBf16<1, 4, 7>();
    DotBf16<2, 5, 6>();
    DotBf16<3, 5, 7>();
  });
}

}  // namespace

void FillCeilingKernels(CpuCeilingKernels& kernels) {
  avx512::FillCeilingKernels(kernels);
  constexpr int64_t kOutputs = int64_t{4} * 16 * 16;
  kernels.tile_int8 = {MultiplyInt8, 2 * kOutputs * 64};
  kernels.tile_bf16 = {MultiplyBf16, 2 * kOutputs * 32};
}

}  // namespace turbomind::amx
