#pragma once

// Constants, loads, stores and casts. A lane whose mask bit is not set is not read or written.

#include "cpu_shim/registers.h"

namespace turbomind {
namespace cpu_shim {

template <class Register>
inline Register LoadAt(const void* p) {
  Register x;
  __builtin_memcpy(&x, p, sizeof(x));
  return x;
}
template <class Register>
inline void StoreAt(void* p, const Register& x) {
  __builtin_memcpy(p, &x, sizeof(x));
}
inline void RequireAligned(const void* p) {
  Require(reinterpret_cast<uintptr_t>(p) % kRegisterBytes == 0,
          "the address of an aligned access is not a multiple of 64");
}

// Loads the lanes of a register whose mask bits are set. The others become zero.
template <class T, class Register>
inline Register LoadMasked(uint64_t mask, const void* p) {
  Register x = {};
  for (size_t i = 0; i < sizeof(Register) / sizeof(T); ++i) {
    if ((mask >> i & 1) != 0) {
      __builtin_memcpy(reinterpret_cast<char*>(&x) + i * sizeof(T),
                       static_cast<const char*>(p) + i * sizeof(T), sizeof(T));
    }
  }
  return x;
}
template <class T, class Register>
inline void StoreMasked(void* p, uint64_t mask, const Register& x) {
  for (size_t i = 0; i < sizeof(Register) / sizeof(T); ++i) {
    if ((mask >> i & 1) != 0) {
      __builtin_memcpy(static_cast<char*>(p) + i * sizeof(T),
                       reinterpret_cast<const char*>(&x) + i * sizeof(T), sizeof(T));
    }
  }
}

}  // namespace cpu_shim

[[gnu::noinline]] inline __m512 _mm512_set1_ps(float x) {
  return cpu_shim::Fill<float>([&](int) { return x; });
}
[[gnu::noinline]] inline __m512i _mm512_set1_epi8(int8_t x) {
  return cpu_shim::Fill<int8_t>([&](int) { return x; });
}
[[gnu::noinline]] inline __m512i _mm512_set1_epi16(int16_t x) {
  return cpu_shim::Fill<int16_t>([&](int) { return x; });
}
[[gnu::noinline]] inline __m512i _mm512_set1_epi32(int32_t x) {
  return cpu_shim::Fill<int32_t>([&](int) { return x; });
}
[[gnu::noinline]] inline __m512i _mm512_set1_epi64(int64_t x) {
  return cpu_shim::Fill<int64_t>([&](int) { return x; });
}
inline __m512 _mm512_setzero_ps() { return _mm512_set1_ps(0.f); }
inline __m512i _mm512_setzero_si512() { return _mm512_set1_epi32(0); }
#undef _mm512_setr_epi32  // macros of GCC's header
#undef _mm512_setr_epi64
template <class... Numbers>
inline __m512i _mm512_setr_epi32(Numbers... x) {
  static_assert(sizeof...(x) == 16);
  const cpu_shim::Lanes<uint32_t> lanes = {{static_cast<uint32_t>(x)...}};
  return __builtin_bit_cast(__m512i, lanes);
}
template <class... Numbers>
inline __m512i _mm512_setr_epi64(Numbers... x) {
  static_assert(sizeof...(x) == 8);
  const cpu_shim::Lanes<uint64_t> lanes = {{static_cast<uint64_t>(x)...}};
  return __builtin_bit_cast(__m512i, lanes);
}

inline __m512 _mm512_loadu_ps(const void* p) { return cpu_shim::LoadAt<__m512>(p); }
inline __m512i _mm512_loadu_si512(const void* p) { return cpu_shim::LoadAt<__m512i>(p); }
inline __m512 _mm512_load_ps(const void* p) {
  cpu_shim::RequireAligned(p);
  return cpu_shim::LoadAt<__m512>(p);
}
inline __m512i _mm512_load_si512(const void* p) {
  cpu_shim::RequireAligned(p);
  return cpu_shim::LoadAt<__m512i>(p);
}
[[gnu::noinline]] inline __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const void* p) {
  return cpu_shim::LoadMasked<float, __m512>(mask, p);
}
[[gnu::noinline]] inline __m128 _mm_maskz_loadu_ps(__mmask8 mask, const void* p) {
  return cpu_shim::LoadMasked<float, __m128>(mask, p);
}
[[gnu::noinline]] inline __m512i _mm512_maskz_loadu_epi8(__mmask64 mask, const void* p) {
  return cpu_shim::LoadMasked<uint8_t, __m512i>(mask, p);
}
[[gnu::noinline]] inline __m128i _mm_maskz_loadu_epi8(__mmask16 mask, const void* p) {
  return cpu_shim::LoadMasked<uint8_t, __m128i>(mask, p);
}
// Loads the dword at p + scale * lane for each lane.
[[gnu::noinline]] inline __m512i _mm512_i32gather_epi32(__m512i lanes, const void* p, int scale) {
  const auto at = cpu_shim::Split<int32_t>(lanes);
  return cpu_shim::Fill<int32_t>([&](int i) {
    return cpu_shim::LoadAt<int32_t>(static_cast<const char*>(p) + int64_t{at.of[i]} * scale);
  });
}

inline void _mm512_storeu_ps(void* p, __m512 a) { cpu_shim::StoreAt(p, a); }
inline void _mm512_storeu_si512(void* p, __m512i a) { cpu_shim::StoreAt(p, a); }
inline void _mm512_store_ps(void* p, __m512 a) {
  cpu_shim::RequireAligned(p);
  cpu_shim::StoreAt(p, a);
}
inline void _mm512_store_si512(void* p, __m512i a) {
  cpu_shim::RequireAligned(p);
  cpu_shim::StoreAt(p, a);
}
[[gnu::noinline]] inline void _mm512_mask_storeu_ps(void* p, __mmask16 mask, __m512 a) {
  cpu_shim::StoreMasked<float>(p, mask, a);
}
[[gnu::noinline]] inline void _mm_mask_storeu_ps(void* p, __mmask8 mask, __m128 a) {
  cpu_shim::StoreMasked<float>(p, mask, a);
}

[[gnu::noinline]] inline __m512 _mm512_mask_mov_ps(__m512 from, __mmask16 mask, __m512 a) {
  return cpu_shim::Blend<float>(mask, from, a);
}
[[gnu::noinline]] inline __m512i _mm512_mask_mov_epi32(__m512i from, __mmask16 mask, __m512i a) {
  return cpu_shim::Blend<int32_t>(mask, from, a);
}
[[gnu::noinline]] inline __m512i _mm512_maskz_mov_epi32(__mmask16 mask, __m512i a) {
  return cpu_shim::Keep<int32_t>(mask, a);
}
[[gnu::noinline]] inline __m512i _mm512_mask_blend_epi8(__mmask64 mask, __m512i a, __m512i b) {
  return cpu_shim::Blend<uint8_t>(mask, a, b);
}

inline __m512i _mm512_castps_si512(__m512 a) { return (__m512i)a; }
inline __m512 _mm512_castsi512_ps(__m512i a) { return (__m512)a; }
inline __m256 _mm512_castps512_ps256(__m512 a) {
  return __builtin_bit_cast(cpu_shim::FloatHalves, a).half[0];
}
inline __m256i _mm512_castsi512_si256(__m512i a) {
  return __builtin_bit_cast(cpu_shim::IntHalves, a).half[0];
}
inline __m128i _mm512_castsi512_si128(__m512i a) {
  return _mm256_castsi256_si128(_mm512_castsi512_si256(a));
}
// The upper lanes are undefined, so they get a value that no kernel expects.
inline __m512i _mm512_castsi256_si512(__m256i a) {
  const cpu_shim::IntHalves out = {{a, _mm256_set1_epi8(0x5a)}};
  return __builtin_bit_cast(__m512i, out);
}
inline __m512i _mm512_castsi128_si512(__m128i a) {
  return _mm512_castsi256_si512(_mm256_inserti128_si256(_mm256_set1_epi8(0x5a), a, 0));
}
inline __m512i _mm512_zextsi128_si512(__m128i a) {
  return cpu_shim::LoadMasked<uint8_t, __m512i>(0xffff, &a);
}

}  // namespace turbomind
