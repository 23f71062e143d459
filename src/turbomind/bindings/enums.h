#pragma once

// Maps C++ enums to Python strings, and KV formats to the Python enum KvFormat.

#include <pybind11/pybind11.h>

#include <cstddef>
#include <string>

#include "turbomind/core/check.h"
#include "turbomind/core/dtype.h"
#include "turbomind/kv/kv_format.h"
#include "turbomind/ops/matrix_format.h"

namespace turbomind {

// An enum value and its string. Error messages list these strings.
template <class E>
struct EnumName {
  E value;
  const char* name;
};

constexpr EnumName<DataType> kDataTypes[] = {{DataType::kFloat32, "float32"},
                                             {DataType::kFloat16, "float16"},
                                             {DataType::kBFloat16, "bfloat16"}};

// The names of the table of formats.
struct MatrixFormatNames {
  EnumName<MatrixFormat> of[kNumMatrixFormats];
};
inline constexpr MatrixFormatNames kMatrixFormatNames = [] {
  MatrixFormatNames names = {};
  for (int i = 0; i < kNumMatrixFormats; ++i) {
    const auto format = static_cast<MatrixFormat>(i);
    names.of[i] = {format, InfoOf(format).name};
  }
  return names;
}();
inline constexpr auto& kMatrixFormats = kMatrixFormatNames.of;

template <class E, size_t N>
E Parse(const char* what, const EnumName<E> (&names)[N], const std::string& text) {
  std::string choices;
  for (const EnumName<E>& entry : names) {
    if (text == entry.name) {
      return entry.value;
    }
    choices += (choices.empty() ? "" : ", ") + std::string(entry.name);
  }
  throw InvalidArgument(what, "has value \"" + text + "\". It must be one of " + choices);
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

// Converts a KvFormat or its canonical name.
inline KvCacheMode ToKvFormat(const char* what, const pybind11::object& value) {
  pybind11::detail::make_caster<KvCacheMode> format;
  if (format.load(value, false)) {
    return format;
  }
  std::string choices;
  for (const KvCacheMode choice : kAllKvCacheModes) {
    if (pybind11::isinstance<pybind11::str>(value) &&
        value.equal(pybind11::str(ToString(choice)))) {
      return choice;
    }
    choices += (choices.empty() ? "" : ", ") + std::string(ToString(choice));
  }
  throw InvalidArgument(what, "has value " + pybind11::repr(value).cast<std::string>() +
                                  ". It must be a KvFormat: " + choices);
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
