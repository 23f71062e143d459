// Tests FP4 codes, both encoding and use as tensor core operands. Compares software with the GPU's
// instruction for every code under every scale that can be stored.

#include "turbomind/backend/cuda/kv/fragments.cuh"

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <random>

#include "turbomind/backend/cuda/kv/kv_encode.cuh"
#include "turbomind/kv/codec.h"

namespace turbomind::cuda {
namespace {

float HalfOf(uint32_t pair, int which) {
  return HalfToFloat(static_cast<uint16_t>(pair >> (16 * which)));
}

template <KvCacheMode M>
float ScaleValue(uint8_t byte) {
  return M == KvCacheMode::kFp4Mx ? MxStep(byte) : E4M3ToFloat(byte);
}

float CodeValue(uint32_t word, int dim) {
  return E2M1ToFloat(static_cast<uint8_t>(word >> (4 * dim) & 15));
}

// Return words that together have every code at every position.
uint32_t NthWord(int n) { return 0x76543210u + 0x11111111u * static_cast<uint32_t>(n); }

template <KvCacheMode M, bool kHardware>
void CheckProducts(uint8_t byte, uint8_t other) {
  using F = Fp4Fragments<M, kHardware>;
  const float scale[2] = {ScaleValue<M>(byte), ScaleValue<M>(other)};
  const uint32_t both = ScalePair<M, kHardware>(byte, other);
  const uint32_t one = ScalesOf<M, kHardware, false>(byte);
  REQUIRE(ScalesOf<M, kHardware, true>(byte | uint32_t{other} << 8) == both);
  REQUIRE(LowTwice(one) == LowTwice(both));
  REQUIRE(HighTwice(both) == ScalePair<M, kHardware>(other, other));
  for (int n = 0; n < 16; ++n) {
    const uint32_t words[2] = {NthWord(n), NthWord(3 * n + 5)};
    uint32_t pairs[4];
    F::Expand(words[0], pairs);
    for (int p = 0; p < 4; ++p) {
      const uint32_t product = MulHalf2(pairs[p], LowTwice(both));
      REQUIRE(HalfOf(product, 0) * F::kUnit == CodeValue(words[0], F::Low(p)) * scale[0]);
      REQUIRE(HalfOf(product, 1) * F::kUnit == CodeValue(words[0], F::High(p)) * scale[0]);
    }
    uint32_t dims[8];
    F::ExpandTokens(words[0], words[1], dims);
    for (int dim = 0; dim < 8; ++dim) {
      const uint32_t product = MulHalf2(dims[dim], both);
      for (int x = 0; x < 2; ++x) {
        REQUIRE(HalfOf(product, x) * F::kUnit == CodeValue(words[x], dim) * scale[x]);
      }
    }
  }
}

template <KvCacheMode M>
void CheckScales() {
  std::mt19937 random(1);
  for (int byte = 0; byte < 256; ++byte) {
    uint8_t other = 0;
    do {
      other = static_cast<uint8_t>(random());
    } while (!IsLegalScale<M>(other));
    if (IsLegalScale<M>(static_cast<uint8_t>(byte))) {
      CheckProducts<M, false>(static_cast<uint8_t>(byte), other);
      CheckProducts<M, true>(static_cast<uint8_t>(byte), other);
    }
  }
}

TEST_CASE("FP4 operands times their scales equal the codec's values exactly") {
  CheckScales<KvCacheMode::kFp4Mx>();
  CheckScales<KvCacheMode::kFp4Nv>();
}

TEST_CASE("E2M1 codes of the kernels equal those of the host model of the instruction") {
  const auto check = [](float x) {
    REQUIRE(E2m1Byte<false>(x, -x) == E2m1Byte<true>(x, -x));
    REQUIRE(E2m1Byte<false>(-x, x) == E2m1Byte<true>(-x, x));
  };
  constexpr uint32_t kStep = 9973;
  const uint32_t end = FloatBits(7.f);
  for (uint32_t bits = 0; bits < end; bits += kStep) {
    check(BitsFloat(bits));
  }
  for (int code = 0; code < 8; ++code) {  // ties, codes and their neighbors
    const float value = E2M1ToFloat(static_cast<uint8_t>(code));
    const float next = code < 7 ? E2M1ToFloat(static_cast<uint8_t>(code + 1)) : 7.f;
    for (const float x : {value, (value + next) / 2}) {
      check(x);
      check(std::nextafter(x, 7.f));
      check(std::nextafter(x, 0.f));
    }
  }
}

}  // namespace
}  // namespace turbomind::cuda
