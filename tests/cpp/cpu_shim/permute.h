#pragma once

// Moves between lanes. Only as many bits of an index count as there are lanes to select.

#include "cpu_shim/registers.h"

namespace turbomind {
namespace cpu_shim {

// Returns a.lane[index.lane[i]] in lane i.
template <class T, class Register>
inline typename RegisterOf<T>::Type Select(__m512i index, const Register& a) {
  using Index = std::conditional_t<sizeof(T) == 1, uint8_t,
                                   std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>>;
  const auto at = Split<Index>(index);
  const auto x = Split<T>(a);
  return Fill<T>([&](int i) { return x.of[at.of[i] % Lanes<T>::kCount]; });
}

// Selects from the lanes of a, then those of b.
template <class T, class Register>
inline typename RegisterOf<T>::Type Select2(const Register& a, __m512i index, const Register& b) {
  using Index = std::conditional_t<sizeof(T) == 1, uint8_t,
                                   std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>>;
  constexpr unsigned kCount = Lanes<T>::kCount;
  const auto at = Split<Index>(index);
  const auto x = Split<T>(a);
  const auto y = Split<T>(b);
  return Fill<T>([&](int i) {
    const unsigned from = at.of[i] % (2 * kCount);
    return from < kCount ? x.of[from] : y.of[from - kCount];
  });
}

// A run of 128 bits.
struct Quarter {
  uint32_t of[4];
};

// Replaces quarter `at` of a register.
template <class Part>
inline __m512i Insert(const __m512i& a, const Part& part, int at) {
  __m512i out = a;
  __builtin_memcpy(reinterpret_cast<char*>(&out) + static_cast<size_t>(at) * sizeof(part), &part,
                   sizeof(part));
  return out;
}
template <class Part, class Register>
inline Part Extract(const Register& a, int at) {
  Part part;
  __builtin_memcpy(&part,
                   reinterpret_cast<const char*>(&a) + static_cast<size_t>(at) * sizeof(part),
                   sizeof(part));
  return part;
}

}  // namespace cpu_shim

[[gnu::noinline]] inline __m512 _mm512_permutexvar_ps(__m512i index, __m512 a) {
  return cpu_shim::Select<float>(index, a);
}
[[gnu::noinline]] inline __m512i _mm512_permutexvar_epi32(__m512i index, __m512i a) {
  return cpu_shim::Select<int32_t>(index, a);
}
[[gnu::noinline]] inline __m512i _mm512_permutexvar_epi16(__m512i index, __m512i a) {
  return cpu_shim::Select<int16_t>(index, a);
}
[[gnu::noinline]] inline __m512i _mm512_permutexvar_epi8(__m512i index, __m512i a) {
  return cpu_shim::Select<int8_t>(index, a);
}
[[gnu::noinline]] inline __m512 _mm512_permutex2var_ps(__m512 a, __m512i index, __m512 b) {
  return cpu_shim::Select2<float>(a, index, b);
}
[[gnu::noinline]] inline __m512i _mm512_permutex2var_epi32(__m512i a, __m512i index, __m512i b) {
  return cpu_shim::Select2<int32_t>(a, index, b);
}
[[gnu::noinline]] inline __m512i _mm512_permutex2var_epi16(__m512i a, __m512i index, __m512i b) {
  return cpu_shim::Select2<int16_t>(a, index, b);
}
[[gnu::noinline]] inline __m512i _mm512_permutex2var_epi8(__m512i a, __m512i index, __m512i b) {
  return cpu_shim::Select2<int8_t>(a, index, b);
}
// Looks up bytes in each run of 128 bits. An index with its upper bit set gives zero.
[[gnu::noinline]] inline __m512i _mm512_shuffle_epi8(__m512i a, __m512i index) {
  return cpu_shim::TwiceInt([](__m256i x, __m256i i) { return _mm256_shuffle_epi8(x, i); }, a,
                            index);
}
// Permutes each run of four lanes by four fields of two bits.
[[gnu::noinline]] inline __m512 _mm512_permute_ps(__m512 a, int fields) {
  const auto x = cpu_shim::Split<float>(a);
  return cpu_shim::Fill<float>([&](int i) { return x.of[i / 4 * 4 + (fields >> i % 4 * 2 & 3)]; });
}
// Selects two quarters of a, then two of b.
[[gnu::noinline]] inline __m512 _mm512_shuffle_f32x4(__m512 a, __m512 b, int fields) {
  const auto x = cpu_shim::Split<float>(a);
  const auto y = cpu_shim::Split<float>(b);
  return cpu_shim::Fill<float>([&](int i) {
    const int from = (fields >> i / 4 * 2 & 3) * 4 + i % 4;
    return i < 8 ? x.of[from] : y.of[from];
  });
}

[[gnu::noinline]] inline __m512i _mm512_unpacklo_epi8(__m512i a, __m512i b) {
  return cpu_shim::TwiceInt([](__m256i x, __m256i y) { return _mm256_unpacklo_epi8(x, y); }, a, b);
}
[[gnu::noinline]] inline __m512i _mm512_unpackhi_epi8(__m512i a, __m512i b) {
  return cpu_shim::TwiceInt([](__m256i x, __m256i y) { return _mm256_unpackhi_epi8(x, y); }, a, b);
}
[[gnu::noinline]] inline __m512i _mm512_unpacklo_epi16(__m512i a, __m512i b) {
  return cpu_shim::TwiceInt([](__m256i x, __m256i y) { return _mm256_unpacklo_epi16(x, y); }, a, b);
}
[[gnu::noinline]] inline __m512i _mm512_unpackhi_epi16(__m512i a, __m512i b) {
  return cpu_shim::TwiceInt([](__m256i x, __m256i y) { return _mm256_unpackhi_epi16(x, y); }, a, b);
}
[[gnu::noinline]] inline __m512i _mm512_unpacklo_epi32(__m512i a, __m512i b) {
  return cpu_shim::TwiceInt([](__m256i x, __m256i y) { return _mm256_unpacklo_epi32(x, y); }, a, b);
}
[[gnu::noinline]] inline __m512i _mm512_unpackhi_epi32(__m512i a, __m512i b) {
  return cpu_shim::TwiceInt([](__m256i x, __m256i y) { return _mm256_unpackhi_epi32(x, y); }, a, b);
}
[[gnu::noinline]] inline __m512i _mm512_unpacklo_epi64(__m512i a, __m512i b) {
  return cpu_shim::TwiceInt([](__m256i x, __m256i y) { return _mm256_unpacklo_epi64(x, y); }, a, b);
}
[[gnu::noinline]] inline __m512i _mm512_unpackhi_epi64(__m512i a, __m512i b) {
  return cpu_shim::TwiceInt([](__m256i x, __m256i y) { return _mm256_unpackhi_epi64(x, y); }, a, b);
}

[[gnu::noinline]] inline __m512i _mm512_broadcast_i32x4(__m128i a) {
  const auto quarter = __builtin_bit_cast(cpu_shim::Quarter, a);
  return cpu_shim::Fill<uint32_t>([&](int i) { return quarter.of[i % 4]; });
}
[[gnu::noinline]] inline __m512i _mm512_broadcast_i64x4(__m256i a) {
  const cpu_shim::IntHalves out = {{a, a}};
  return __builtin_bit_cast(__m512i, out);
}
[[gnu::noinline]] inline __m512i _mm512_broadcastq_epi64(__m128i a) {
  return cpu_shim::Fill<int64_t>([x = _mm_cvtsi128_si64(a)](int) { return x; });
}
[[gnu::noinline]] inline __m512i _mm512_inserti32x4(__m512i a, __m128i part, int at) {
  return cpu_shim::Insert(a, part, at & 3);
}
[[gnu::noinline]] inline __m512i _mm512_inserti64x4(__m512i a, __m256i part, int at) {
  return cpu_shim::Insert(a, part, at & 1);
}
[[gnu::noinline]] inline __m256 _mm512_extractf32x8_ps(__m512 a, int at) {
  return cpu_shim::Extract<__m256>(a, at & 1);
}
[[gnu::noinline]] inline __m256i _mm512_extracti64x4_epi64(__m512i a, int at) {
  return cpu_shim::Extract<__m256i>(a, at & 1);
}
[[gnu::noinline]] inline __m128 _mm512_maskz_extractf32x4_ps(__mmask8 mask, __m512 a, int at) {
  const auto x = cpu_shim::Split<float>(a);
  float out[4];
  for (int i = 0; i < 4; ++i) {
    out[i] = (mask >> i & 1) != 0 ? x.of[(at & 3) * 4 + i] : 0.f;
  }
  return __builtin_bit_cast(__m128, out);
}

// Returns eight bits of the qword in each byte, from the bit that the byte of `from` names on.
[[gnu::noinline]] inline __m512i _mm512_multishift_epi64_epi8(__m512i from, __m512i a) {
  const auto at = cpu_shim::Split<uint8_t>(from);
  const auto x = cpu_shim::Split<uint64_t>(a);
  return cpu_shim::Fill<uint8_t>([&](int i) {
    const unsigned bit = at.of[i] % 64;
    const uint64_t qword = x.of[i / 8];
    return bit == 0 ? qword : qword >> bit | qword << (64 - bit);
  });
}
[[gnu::noinline]] inline __m512i _mm512_mask_multishift_epi64_epi8(__m512i old, __mmask64 mask,
                                                                   __m512i from, __m512i a) {
  return cpu_shim::Blend<uint8_t>(mask, old, _mm512_multishift_epi64_epi8(from, a));
}
[[gnu::noinline]] inline __m512i _mm512_maskz_multishift_epi64_epi8(__mmask64 mask, __m512i from,
                                                                    __m512i a) {
  return cpu_shim::Keep<uint8_t>(mask, _mm512_multishift_epi64_epi8(from, a));
}

}  // namespace turbomind
