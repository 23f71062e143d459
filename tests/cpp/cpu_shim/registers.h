#pragma once

// 512-bit registers as lanes of any type, and as two registers of AVX2.

#include_next <immintrin.h>  // the compiler's: this folder precedes tests/cpp in the include path

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <type_traits>

namespace turbomind::cpu_shim {

inline constexpr size_t kRegisterBytes = 64;

// Ends the program if a kernel breaks a rule of an instruction, as a fault would.
inline void Require(bool condition, const char* rule) {
  if (!condition) {
    std::fprintf(stderr, "cpu_shim: %s\n", rule);
    std::abort();
  }
}

template <class T>
struct Lanes {
  static constexpr int kCount = kRegisterBytes / sizeof(T);
  T of[kCount];
};

// Lanes of float make a __m512, other lanes a __m512i.
template <class T>
struct RegisterOf {
  using Type = __m512i;
};
template <>
struct RegisterOf<float> {
  using Type = __m512;
};

template <class T, class Register>
inline Lanes<T> Split(const Register& x) {
  static_assert(sizeof(Register) == kRegisterBytes);
  return __builtin_bit_cast(Lanes<T>, x);
}

// Returns the register whose lane i is fn(i).
template <class T, class Fn>
inline typename RegisterOf<T>::Type Fill(const Fn& fn) {
  Lanes<T> lanes;
  for (int i = 0; i < Lanes<T>::kCount; ++i) {
    lanes.of[i] = static_cast<T>(fn(i));
  }
  return __builtin_bit_cast(typename RegisterOf<T>::Type, lanes);
}

// Applies fn to every lane.
template <class T, class Fn, class Register>
inline typename RegisterOf<T>::Type Map(const Fn& fn, const Register& a) {
  const Lanes<T> x = Split<T>(a);
  return Fill<T>([&](int i) { return fn(x.of[i]); });
}
template <class T, class Fn, class Register>
inline typename RegisterOf<T>::Type Map(const Fn& fn, const Register& a, const Register& b) {
  const Lanes<T> x = Split<T>(a);
  const Lanes<T> y = Split<T>(b);
  return Fill<T>([&](int i) { return fn(x.of[i], y.of[i]); });
}

// Returns the bits of the lanes for which fn(lane of a, lane of b) is true.
template <class T, class Fn, class Register>
inline uint64_t MaskOf(const Fn& fn, const Register& a, const Register& b) {
  const Lanes<T> x = Split<T>(a);
  const Lanes<T> y = Split<T>(b);
  uint64_t mask = 0;
  for (int i = 0; i < Lanes<T>::kCount; ++i) {
    mask |= uint64_t{fn(x.of[i], y.of[i])} << i;
  }
  return mask;
}

// Returns lane i of b where bit i of the mask is set, else lane i of a.
template <class T, class Register>
inline typename RegisterOf<T>::Type Blend(uint64_t mask, const Register& a, const Register& b) {
  const Lanes<T> x = Split<T>(a);
  const Lanes<T> y = Split<T>(b);
  return Fill<T>([&](int i) { return (mask >> i & 1) != 0 ? y.of[i] : x.of[i]; });
}

// Returns b with zeros where bit i of the mask is not set.
template <class T, class Register>
inline typename RegisterOf<T>::Type Keep(uint64_t mask, const Register& b) {
  const Lanes<T> y = Split<T>(b);
  return Fill<T>([&](int i) { return (mask >> i & 1) != 0 ? y.of[i] : T{}; });
}

struct IntHalves {
  __m256i half[2];
};
struct FloatHalves {
  __m256 half[2];
};

// Applies an instruction of AVX2 on __m256i to both halves.
template <class Fn, class... Registers>
inline __m512i TwiceInt(const Fn& fn, const Registers&... x) {
  IntHalves out;
  for (int i = 0; i < 2; ++i) {
    out.half[i] = fn(__builtin_bit_cast(IntHalves, x).half[i]...);
  }
  return __builtin_bit_cast(__m512i, out);
}

// Applies an instruction of AVX on __m256 to both halves.
template <class Fn, class... Registers>
inline __m512 TwiceFloat(const Fn& fn, const Registers&... x) {
  FloatHalves out;
  for (int i = 0; i < 2; ++i) {
    out.half[i] = fn(__builtin_bit_cast(FloatHalves, x).half[i]...);
  }
  return __builtin_bit_cast(__m512, out);
}

}  // namespace turbomind::cpu_shim
