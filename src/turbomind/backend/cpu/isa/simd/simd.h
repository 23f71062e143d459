#pragma once

// ⑥⑦ Sixteen FP32 or int32 lanes with the same operations for every instruction set. Each operation
// returns the same bits in all three implementations; sums over lanes have one fixed order. A
// kernel written with them therefore returns the same bits on every CPU. Everything is always
// inlined and is in the per-target namespace.
//
// Types: F32x16, I32x16, Mask16 (one flag per lane), Table16 (16 floats, looked up by the low 4
// bits), Part (as many lanes of an I32x16 as one register holds).

#include <cstdint>

#include "turbomind/core/host_device.h"

#if defined(TM_ISA_avx512)
#include "turbomind/backend/cpu/isa/simd/simd_avx512.h"
#elif defined(TM_ISA_avx2)
#include "turbomind/backend/cpu/isa/simd/simd_avx2.h"
#else
#include "turbomind/backend/cpu/isa/simd/simd_scalar.h"
#endif

namespace turbomind::TM_ISA {

inline constexpr int kLanes = 16;

#if !defined(TM_ISA_avx512)  // AVX-512 has instructions of its own for this
// Loads 16 bytes each from a (low halves) and b (high halves).
TM_HD I32x16 LoadBytePairs(const void* a, const void* b) {
  return Or(LoadBytes(a), ShiftLeft<16>(LoadBytes(b)));
}
#endif

#if !defined(TM_ISA_avx2)  // AVX2 registers hold half of the lanes
inline constexpr int kParts = 1;
using Part = I32x16;
template <int P>
TM_HD Part PartOf(const I32x16& x) {
  return x;
}
template <int P>
TM_HD void SetPart(I32x16& x, const Part& part) {
  x = part;
}
#endif

// Calls fn(Index<0>()), ..., fn(Index<N - 1>()): a loop whose index is a constant in each
// iteration.
template <int I>
struct Index {
  static constexpr int value = I;
};
template <int N, class F>
TM_HD void Unroll(F fn) {
  if constexpr (N > 0) {
    Unroll<N - 1>(fn);
    fn(Index<N - 1>());
  }
}

TM_HD F32x16 Zero() { return Set1(0.f); }

// Returns the largest lane of a[i % 4] in lane i. REQUIRES: no lane is NaN.
TM_HD F32x16 MaxOfEach(const F32x16 (&a)[4]) {
  I32x16 quads[4] = {Bits(a[0]), Bits(a[1]), Bits(a[2]), Bits(a[3])};
  TransposeQuads(quads);
  F32x16 max_value =
      Max(Max(FromBits(quads[0]), FromBits(quads[1])), Max(FromBits(quads[2]), FromBits(quads[3])));
  max_value = Max(max_value, SwapLanes<4>(max_value));
  return Max(max_value, SwapLanes<8>(max_value));
}

// Replaces each x <= 0 with 2^x, with a relative error below 1e-7 (about one ulp). The result is
// exactly 1 at 0, 0 below -126, and NaN for NaN. Rounds x to the nearest integer n and evaluates a
// polynomial on [-0.5, 0.5]. The steps of all vectors are interleaved: one is a chain of 40 cycles,
// of which too few fit into the window of instructions that wait for their operands.
template <int N>
TM_HD void Exp2All(F32x16 (&x)[N]) {
  constexpr float kTerms[] = {1.3398896e-3f,  9.61843599e-3f, 5.55033237e-2f,
                              2.40226477e-1f, 6.93147182e-1f, 1.f};
  const F32x16 lowest = Set1(-126.f);
  const F32x16 magic = Set1(12582912.f);  // 1.5 * 2^23: the sum's low bits are the integer
  Mask16 vanishes[N];
  F32x16 shifted[N];
  F32x16 f[N];
  F32x16 p[N];
  Unroll<N>([&](auto index) __attribute__((always_inline)) {
    constexpr int i = decltype(index)::value;
    vanishes[i] = Less(x[i], lowest);
    const F32x16 clamped = Max(lowest, x[i]);
    shifted[i] = Add(clamped, magic);
    f[i] = Sub(clamped, Sub(shifted[i], magic));
    p[i] = Set1(1.53536763e-4f);
  });
  Unroll<6>([&](auto term) __attribute__((always_inline)) {
    Unroll<N>([&](auto index) __attribute__((always_inline)) {
      constexpr int i = decltype(index)::value;
      p[i] = Fma(p[i], f[i], Set1(kTerms[decltype(term)::value]));
      KeepOrder(p[i]);
    });
  });
  Unroll<N>([&](auto index) __attribute__((always_inline)) {
    constexpr int i = decltype(index)::value;
    const I32x16 exponent = ShiftLeft<23>(Bits(shifted[i]));
    x[i] = Select(vanishes[i], Zero(), FromBits(Add(Bits(p[i]), exponent)));
  });
}

// Returns 2^x for x <= 0, with the bits of Exp2All.
TM_HD F32x16 Exp2(F32x16 x) {
  F32x16 one[1] = {x};
  Exp2All<1>(one);
  return one[0];
}

// Returns 2^x for one number, with the bits of Exp2.
TM_HD float Exp2Scalar(float x) { return First(Exp2(Set1(x))); }

}  // namespace turbomind::TM_ISA
