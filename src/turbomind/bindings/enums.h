#pragma once

// Maps C++ enums to Python strings.

#include <pybind11/pybind11.h>

#include <cstddef>
#include <string>

#include "turbomind/core/check.h"
#include "turbomind/core/dtype.h"
#include "turbomind/kv/kv_cache_mode.h"
#include "turbomind/ops/params.h"

namespace turbomind {

// An enum value and its string. Error messages list these strings.
template <class E>
struct EnumName {
  E value;
  const char* name;
};

// Only canonical names. get_kv_cache_mode resolves aliases.
constexpr EnumName<KvCacheMode> kKvFormats[] = {
    {KvCacheMode::kNone, "none"},        {KvCacheMode::kInt8, "int8"},
    {KvCacheMode::kInt4, "int4"},        {KvCacheMode::kFp8E4m3, "fp8"},
    {KvCacheMode::kFp8E5m2, "fp8_e5m2"}, {KvCacheMode::kFp4Mx, "mxfp4"},
    {KvCacheMode::kFp4Nv, "nvfp4"}};

constexpr EnumName<DataType> kDataTypes[] = {{DataType::kFloat32, "float32"},
                                             {DataType::kFloat16, "float16"},
                                             {DataType::kBFloat16, "bfloat16"}};

constexpr EnumName<MatrixFormat> kMatrixFormats[] = {{MatrixFormat::kF32, "f32"},
                                                     {MatrixFormat::kBF16, "bf16"},
                                                     {MatrixFormat::kQ4_0, "q4_0"},
                                                     {MatrixFormat::kQ4_1, "q4_1"},
                                                     {MatrixFormat::kQ8_0, "q8_0"},
                                                     {MatrixFormat::kMxfp4, "mxfp4"},
                                                     {MatrixFormat::kMxfp4Split, "mxfp4_split"}};

template <class E, size_t N>
E Parse(const char* what, const EnumName<E> (&names)[N], const std::string& text) {
  std::string choices;
  for (const EnumName<E>& entry : names) {
    if (text == entry.name) {
      return entry.value;
    }
    choices += (choices.empty() ? "" : ", ") + std::string(entry.name);
  }
  throw InvalidArgument(std::string(what) + " has value \"" + text + "\". It must be one of " +
                        choices);
}

template <class E, size_t N>
std::string Name(const EnumName<E> (&names)[N], E value) {
  for (const EnumName<E>& entry : names) {
    if (entry.value == value) {
      return entry.name;
    }
  }
  throw InternalError("every enum value must have a name");
}

// Defines a string property for an enum member.
template <class C, class... Options, class E, size_t N>
void DefEnum(pybind11::class_<C, Options...>& target, const char* name, E C::*member,
             const EnumName<E> (&names)[N]) {
  target.def_property(
      name, [member, &names](const C& self) { return Name(names, self.*member); },
      [name, member, &names](C& self, const std::string& text) {
        self.*member = Parse(name, names, text);
      });
}

}  // namespace turbomind
