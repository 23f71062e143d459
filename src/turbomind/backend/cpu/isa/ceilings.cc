// The fastest loops that this instruction set allows: a read of memory, and products in registers.
// A round multiplies kLeft vectors by kRight others, loaded from L1: more products than loads, and
// enough independent sums to hide the latency of each.

#include <cstddef>
#include <cstdint>

#include "turbomind/backend/cpu/ceiling_kernels.h"
#include "turbomind/core/host_device.h"

#if defined(TM_ISA_avx512) || defined(TM_ISA_avx2)
#include <immintrin.h>
#endif

namespace turbomind::TM_ISA {
namespace {

// Each has: Operand; Sum, of Lanes; Add(sum, a, b) = sum + a · b, of kMultiplyAdds; and how many
// operands a round takes on either side.
#if defined(TM_ISA_avx512)

using Word = __m512i;
TM_HD Word Xor(Word a, Word b) { return _mm512_xor_si512(a, b); }

struct Int8Product {
  using Operand = __m512i;
  using Sum = __m512i;
  using Lane = uint32_t;
  static constexpr int kLeft = 4, kRight = 3, kMultiplyAdds = 64;
  static TM_HD Sum Add(Sum sum, Operand a, Operand b) { return _mm512_dpbusd_epi32(sum, a, b); }
};

struct Bf16Product {
  using Operand = __m512i;
  using Sum = __m512;
  using Lane = float;
  static constexpr int kLeft = 4, kRight = 3, kMultiplyAdds = 32;
  static TM_HD Sum Add(Sum sum, Operand a, Operand b) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
};

struct Fp32Product {
  using Operand = __m512;
  using Sum = __m512;
  using Lane = float;
  static constexpr int kLeft = 4, kRight = 3, kMultiplyAdds = 16;
  static TM_HD Sum Add(Sum sum, Operand a, Operand b) { return _mm512_fmadd_ps(a, b, sum); }
};

#elif defined(TM_ISA_avx2)

using Word = __m256i;
TM_HD Word Xor(Word a, Word b) { return _mm256_xor_si256(a, b); }

struct Int8Product {
  using Operand = __m256i;
  using Sum = __m256i;
  using Lane = uint16_t;  // as 4-bit codes are summed; wraps here
  static constexpr int kLeft = 4, kRight = 2, kMultiplyAdds = 32;  // 12 sums would not fit
  static TM_HD Sum Add(Sum sum, Operand a, Operand b) {
    return _mm256_add_epi16(sum, _mm256_maddubs_epi16(a, b));
  }
};

struct Fp32Product {
  using Operand = __m256;
  using Sum = __m256;
  using Lane = float;
  static constexpr int kLeft = 4, kRight = 3, kMultiplyAdds = 8;
  static TM_HD Sum Add(Sum sum, Operand a, Operand b) { return _mm256_fmadd_ps(a, b, sum); }
};

#else

using Word = uint64_t;
TM_HD Word Xor(Word a, Word b) { return a ^ b; }

struct Int8Product {
  using Operand = int8_t;
  using Sum = uint32_t;
  using Lane = uint32_t;
  static constexpr int kLeft = 4, kRight = 2, kMultiplyAdds = 1;
  static TM_HD Sum Add(Sum sum, Operand a, Operand b) { return sum + static_cast<uint32_t>(a * b); }
};

struct Fp32Product {
  using Operand = float;
  using Sum = float;
  using Lane = float;
  static constexpr int kLeft = 4, kRight = 2, kMultiplyAdds = 1;
  static TM_HD Sum Add(Sum sum, Operand a, Operand b) { return sum + a * b; }
};

#endif

template <class T>
TM_HD T Load(const uint8_t* p) {
  T value;
  __builtin_memcpy(&value, p, sizeof(value));
  return value;
}

template <class P>
float Multiply(const uint8_t* operands, int64_t rounds) {
  using Operand = typename P::Operand;
  constexpr int64_t kRoundBytes = sizeof(Operand) * 8;  // at least kLeft + kRight operands
  static_assert(P::kLeft + P::kRight <= 8 && kCeilingOperandBytes % kRoundBytes == 0);
  typename P::Sum sums[P::kLeft * P::kRight] = {};
  for (int64_t round = 0; round < rounds; ++round) {
    const uint8_t* at = operands + round * kRoundBytes % kCeilingOperandBytes;
    Operand right[P::kRight];
#pragma GCC unroll 4
    for (int j = 0; j < P::kRight; ++j) {
      right[j] = Load<Operand>(at + (P::kLeft + j) * static_cast<int64_t>(sizeof(Operand)));
    }
#pragma GCC unroll 4
    for (int i = 0; i < P::kLeft; ++i) {
      const Operand left = Load<Operand>(at + i * static_cast<int64_t>(sizeof(Operand)));
#pragma GCC unroll 4
      for (int j = 0; j < P::kRight; ++j) {
        sums[i * P::kRight + j] = P::Add(sums[i * P::kRight + j], left, right[j]);
      }
    }
  }
  // Through memory: GCC 12 warns of its own _mm512_reduce_add.
  constexpr size_t kLaneBytes = sizeof(typename P::Lane);
  typename P::Lane lanes[sizeof(sums) / kLaneBytes];
  __builtin_memcpy(lanes, sums, sizeof(lanes));
  float total = 0.f;
  for (const typename P::Lane lane : lanes) {
    total += static_cast<float>(lane);
  }
  return total;
}

template <class P>
MultiplyCeiling Ceiling() {
  return {Multiply<P>, 2 * int64_t{P::kLeft} * P::kRight * P::kMultiplyAdds};
}

uint64_t Read(const uint8_t* data, int64_t num_bytes) {
  constexpr int kWords = 8;
  constexpr int64_t kStep = kWords * static_cast<int64_t>(sizeof(Word));
  Word sums[kWords] = {};
  for (int64_t i = 0; i < num_bytes; i += kStep) {
#pragma GCC unroll 8
    for (int j = 0; j < kWords; ++j) {
      const Word word = Load<Word>(data + i + j * static_cast<int64_t>(sizeof(Word)));
      sums[j] = Xor(sums[j], word);
    }
  }
  uint64_t result = 0;
  for (const Word& sum : sums) {
    uint64_t parts[sizeof(Word) / 8];
    __builtin_memcpy(parts, &sum, sizeof(parts));
    for (uint64_t part : parts) {
      result ^= part;
    }
  }
  return result;
}

}  // namespace

void FillCeilingKernels(CpuCeilingKernels& kernels) {
  kernels.read = Read;
  kernels.int8 = Ceiling<Int8Product>();
  kernels.fp32 = Ceiling<Fp32Product>();
#if defined(TM_ISA_avx512)
  kernels.bf16 = Ceiling<Bf16Product>();
#endif
}

}  // namespace turbomind::TM_ISA
